"""Static micro-batches on an engine: each finishes before the next starts.

Runs the plans of :mod:`~benchmarks.paper_scheduling.static` with the engine's public ``generate``. It is
slower than the engine's own scheduling and serves to compare with the paper. Knows an engine only by that
method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Protocol

from benchmarks.paper_scheduling.static import MicroBatches, StaticOptions
from local_backend.scheduling.lengths import Prediction
from local_backend.sequences.detokenizing import Detokenizer
from local_backend.sequences.outputs import Completion, Stats
from local_backend.sequences.request import References
from local_backend.sequences.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Generates(Protocol):
    """The part of :class:`~local_backend.Engine` that is needed."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        ...

    @property
    def max_positions(self) -> int:
        """Maximum tokens of prompt and answer together."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        references: Sequence[Sequence[str] | References | None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt and wait for all of them."""
        ...


@dataclass(slots=True)
class _Answer:
    """A row's request and its completions so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    references: Sequence[str] | References | None
    parts: list[Completion]


def run_static(
    engine: Generates,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    predictions: Sequence[Prediction | None],
    options: StaticOptions | None = None,
    *,
    references: Sequence[Sequence[str] | References | None] | None = None,
) -> list[Completion]:
    """Continue every prompt, in static micro-batches by predicted length.

    The answers are those of ``engine.generate``. A row that exceeds its batch's limit resumes from its tokens
    so far, which the engine's prefix cache still holds if it has memory. A sampled row, or one with stop
    sequences, logits processors or log probabilities, restarts with the same seed, because it could not be
    resumed exactly. The engine's own logits processors must not depend on where the prompt ends, unless
    ``options.resume`` is off.

    Args:
        engine: Runs the batches.
        prompts: Token ids of each prompt.
        params: One for each prompt; ``max_tokens`` defaults to ``options.max_tokens``.
        predictions: One for each prompt.
        options: Which parts of the method are used.
        references: For each prompt, text that may be copied.

    Returns:
        Completions in the order of the prompts. The statistics of a preempted one cover all its parts.

    Raises:
        ValueError: The lists differ in length, an answer may become longer than ``options.max_tokens``, or
            the engine refuses a prompt.
    """
    options = options or StaticOptions()
    each_references = references if references is not None else [None] * len(prompts)
    if not len(prompts) == len(params) == len(predictions) == len(each_references):
        raise ValueError(
            f"{len(prompts)} prompts, {len(params)} params, {len(predictions)} predictions and "
            f"{len(each_references)} references: give one of each for every prompt"
        )
    rng = Random()
    answers = [
        _Answer(tuple(prompt), _seeded(one, rng), texts, [])
        for prompt, one, texts in zip(prompts, params, each_references, strict=True)
    ]
    for first in range(0, len(answers), options.group_rows):
        group = answers[first : first + options.group_rows]
        batches = MicroBatches(
            predictions[first : first + options.group_rows],
            options,
            max_tokens=[answer.params.max_tokens or options.max_tokens for answer in group],
            prompt_tokens=[len(answer.prompt) for answer in group],
        )
        while (batch := batches.next()) is not None:
            members = [group[row] for row in batch.rows]
            _run(engine, members, batch.limits)
            for row, answer in zip(batch.rows, members, strict=True):
                most = answer.params.max_tokens or options.max_tokens
                length = len(answer.prompt) + sum(len(part.token_ids) for part in answer.parts)
                has_room = length < min(len(answer.prompt) + most, engine.max_positions)
                if answer.parts[-1].finish_reason == "length" and has_room:
                    batches.preempt(row)
                    if not (options.resume and _can_go_on(answer.params)):
                        answer.parts[-1] = replace(answer.parts[-1], token_ids=[], logprobs=None)
    return [_joined(answer, engine.tokenizer) for answer in answers]


def _run(engine: Generates, answers: Sequence[_Answer], limits: Sequence[int]) -> None:
    """Let each row decode until its answer has as many tokens as its limit."""
    written = [[token for part in answer.parts for token in part.token_ids] for answer in answers]
    completions = engine.generate(
        [(*answer.prompt, *tokens) for answer, tokens in zip(answers, written, strict=True)],
        [
            replace(answer.params, max_tokens=limit - len(tokens))
            for answer, tokens, limit in zip(answers, written, limits, strict=True)
        ],
        [answer.references for answer in answers],
    )
    for answer, completion in zip(answers, completions, strict=True):
        answer.parts.append(completion)


def _seeded(params: SamplingParams, rng: Random) -> SamplingParams:
    """The parameters with a seed, so that a restarted row decodes the same tokens.

    Without it, preempted rows, which are the long ones, would get a second chance to be short.
    """
    if params.is_greedy or params.seed is not None:
        return params
    return replace(params, seed=rng.getrandbits(62))


def _can_go_on(params: SamplingParams) -> bool:
    """Whether continuing the prompt and a partial answer gives the same as the prompt alone."""
    return params.is_greedy and not params.stop and not params.logits_processors and params.logprobs is None


def _joined(answer: _Answer, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """All parts of an answer as one completion."""
    last = answer.parts[-1]
    if len(answer.parts) == 1:
        return last
    token_ids = [token for part in answer.parts for token in part.token_ids]
    text = last.text
    if len(token_ids) > len(last.token_ids):  # it was resumed: the text of the parts may differ at the seams
        detokenizer = Detokenizer(tokenizer)
        text = detokenizer.push(token_ids) + detokenizer.finish()
    stats = Stats(
        submitted_seconds=answer.parts[0].stats.submitted_seconds,
        first_token_seconds=answer.parts[0].stats.first_token_seconds,
        finished_seconds=last.stats.finished_seconds,
    )
    for part in answer.parts:
        stats.num_forwards += part.stats.num_forwards
        stats.num_tokens += len(part.token_ids)
        stats.num_drafted += part.stats.num_drafted
        stats.num_accepted += part.stats.num_accepted
        stats.num_prefilled += part.stats.num_prefilled
        stats.tokens_by_forward += part.stats.tokens_by_forward
    return replace(last, token_ids=token_ids, text=text, stats=stats, num_prompt_tokens=len(answer.prompt))
