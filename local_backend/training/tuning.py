"""From prompts to a tuned model: rounds of collecting, training and measuring, resumable at every point.

Knows the stages and their order. Each round decodes the prompts with the current model, so that it learns
from its own guesses.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from local_backend.offline.prompt_file import read_examples, read_prompts
from local_backend.sequences.outputs import Trajectory
from local_backend.training.checkpoints import claim, has_model, write_model, write_whole
from local_backend.training.evaluation import Evaluation, Likeness, Quality, evaluate, likeness
from local_backend.training.examples import Joined
from local_backend.training.packing import PackedForward
from local_backend.training.rounds import (
    WITHOUT_EFFECT,
    TuneOptions,
    last_layers_of,
    load_for_training,
    stored_dtype,
    train_round,
)
from local_backend.training.trajectories import Accept, collect_trajectories
from local_backend.training.trajectory_store import (
    StoredTrajectories,
    digest_of,
    digest_of_prompts,
    fingerprint,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_STATE = "tuning.json"


@dataclass(frozen=True)
class Report:
    """Results of tuning, on held-out prompts.

    Attributes:
        before, after: Speed and quality of the plain and of the tuned model.
        plain, tuned: How near the answers of each are to the plain model's; for the plain model that is its
            answers by Jacobi decoding, which rounding alone can change.
        history: Records of ``step``, ``tokens_per_forward`` and ``quality``.
        counts: For each round, how many trajectories were kept and left out.
        is_complete: Whether all rounds were trained; ``False`` if the time was up before.
    """

    before: Evaluation
    after: Evaluation
    plain: Likeness
    tuned: Likeness
    history: Sequence[Mapping[str, float]]
    counts: Sequence[Mapping[str, int]]
    is_complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The report as it is written to ``report.json``."""
        return {**asdict(self), "before": self.before.as_dict(), "after": self.after.as_dict()}


def tune(
    model_path: str | Path,
    prompts: str | Path | Iterable[Mapping[str, Any]],
    output: Path,
    options: TuneOptions | None = None,
    *,
    limit: int | None = None,
    examples: str | Path | Iterable[Mapping[str, Any]] | None = None,
    quality: Callable[[Sequence[Sequence[int]]], Quality] | None = None,
    accept: Accept | None = None,
    template: str | None = None,
    max_hours: float | None = None,
    tell: Callable[[str], None] = print,
) -> Report:
    """Tune a causal language model for consistency on its own trajectories.

    Args:
        model_path: Folder, or name on the model hub, of the model; ``"default"`` is the default model.
        prompts: See :func:`~local_backend.offline.prompt_file.read_prompts`.
        output: Folder of the tuned model, whose weights have the dtype that the original is stored in. Work
            in progress is kept in ``output/work``: another call with the same arguments, or with more rounds,
            resumes it.
        options: How it is tuned.
        limit: Use only this many first prompts.
        examples: Prompts with right answers, see :func:`~local_backend.offline.prompt_file.read_examples`.
            They are trained on in addition to the trajectories, with random noise, and need no decoding.
        quality: Given the held-out prompts, returns a measure of answers to them. By default, the share of
            answers equal to the plain model's.
        accept: Which answers are worth learning from, see
            :func:`~local_backend.training.trajectories.collect_trajectories`.
        template: A user's message with fields of the prompts' records, see ``read_prompts``.
        max_hours: Stop after this long, measuring included: the model is written as it is by then, and
            another call with the same arguments trains it further.
        tell: Called with messages about progress and results.

    Raises:
        ValueError: A prompt, the tokenizer, the model or the work in progress is invalid; all of it is
            checked before anything is computed.
        TimeoutError: The time was up before training began; what was collected is kept.
    """
    options = options or TuneOptions()
    if max_hours is not None and not max_hours > 0:
        raise ValueError(f"max_hours must be above 0, got {max_hours}")
    started = time.monotonic()
    if output.resolve() == Path(model_path).resolve():
        raise ValueError(f"{output} holds the model that is to be tuned: give another output folder")
    model, tokenizer = load_for_training(model_path)
    forward = PackedForward(model)  # raises if the model cannot be trained
    last_layers_of(model, options.last_layers or 0)  # raises if it has fewer
    all_prompts = read_prompts(
        prompts,
        tokenizer,
        max_positions=forward.max_positions,
        max_tokens=options.collect.max_tokens,
        vocabulary_size=forward.vocabulary_size,
        limit=limit,
        template=template,
    )
    train_prompts, held_out = split_held_out(all_prompts, options)
    references: list[Trajectory] = []
    if examples is not None:
        references = read_examples(
            examples,
            tokenizer,
            max_positions=forward.max_positions,
            vocabulary_size=forward.vocabulary_size,
        )
    work = output / "work"
    wanted = {
        "model": fingerprint(model, tokenizer),
        "prompts": digest_of_prompts(all_prompts),
        "examples": digest_of(references),
        "options": asdict(options),
    }
    # Rounds may be added later.
    claim(work / _STATE, wanted, may_differ={*WITHOUT_EFFECT, "options.num_rounds"})

    def measure_of(
        judge: Quality,
    ) -> Callable[[PreTrainedModel], dict[str, float]]:
        def measure(measured: PreTrainedModel) -> dict[str, float]:
            figures = evaluate(
                measured,
                tokenizer,
                held_out,
                max_tokens=options.collect.max_tokens,
                block_size=options.collect.block_size,
                quality=judge,
            )
            return {"tokens_per_forward": figures.tokens_per_forward, "quality": figures.quality or 0.0}

        return measure

    measuring = time.monotonic()
    plain_answers = _answers(model, tokenizer, held_out, options)
    judge = quality(held_out) if quality else same_answers(plain_answers)
    before = _evaluate_timed(model, tokenizer, held_out, options, judge)
    plain = likeness(model, held_out, before.answers, plain_answers)
    tell(f"plain: {describe(before, plain)}")
    # Measuring the tuned model takes about as long as this did.
    deadline = math.inf if max_hours is None else started + 3600 * max_hours - (time.monotonic() - measuring)

    history: list[dict[str, float]] = [
        {"step": 0, "tokens_per_forward": before.tokens_per_forward, "quality": before.quality or 0.0}
    ]
    counts: list[dict[str, int]] = []
    is_complete = True
    for number in range(options.num_rounds):
        folder = work / f"round-{number}"
        try:
            counts.append(
                collect_trajectories(
                    model,
                    tokenizer,
                    train_prompts,
                    folder / "trajectories",
                    options.collect,
                    accept=accept,
                    deadline=deadline,
                )
            )
        except TimeoutError:
            if not number:
                raise
            is_complete = False
            break
        tell(f"round {number + 1}: {_describe_counts(counts[-1])}")
        if not has_model(folder / "model"):
            stored = StoredTrajectories(folder / "trajectories", model, tokenizer)
            trajectories = Joined(stored, references)
            is_complete = train_round(
                model,
                tokenizer,
                trajectories,
                folder,
                options,
                measure=measure_of(judge),
                deadline=deadline,
                tell=tell,
            )
        log = json.loads((folder / "history.json").read_text("utf-8"))
        history += [{**record, "step": record["step"] + number * options.num_steps} for record in log]
        model, _ = load_for_training(folder / ("model" if is_complete else "unfinished"))
        if not is_complete:
            break

    # Measured as it will be used: with weights rounded to the stored dtype.
    cast("Any", model).to(stored_dtype(model_path))
    write_model(model, tokenizer, output)
    model.float()
    after = _evaluate_timed(model, tokenizer, held_out, options, judge)
    tuned = likeness(model, held_out, after.answers, plain_answers)
    report = Report(before, after, plain, tuned, history, counts, is_complete)
    tell(f"plain: {describe(before, plain)}")
    tell(f"tuned: {describe(after, tuned)}")
    if not is_complete:
        tell("the time was up: the same command trains it further")
    write_whole(output / "report.json", json.dumps(report.as_dict(), indent=1) + "\n")
    return report


def split_held_out(
    prompts: Sequence[list[int]], options: TuneOptions
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to train on and held-out prompts, drawn at random; the same for the same seed.

    Raises:
        ValueError: There are too few to hold one out.
    """
    different = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    num_held_out = min(options.num_held_out, len(different) // 5)
    if not num_held_out:
        raise ValueError(
            f"there are {len(different)} different prompts, too few to hold some out for measuring: "
            "give at least 5"
        )
    random.Random(options.seed).shuffle(different)
    return different[num_held_out:], different[:num_held_out]


def same_answers(expected: Sequence[Sequence[int]]) -> Quality:
    """A measure of quality: the share of answers equal to the expected ones, token for token."""

    def judge(completions: Sequence[Any]) -> float:
        pairs = zip(completions, expected, strict=True)
        return sum(list(c.token_ids) == list(answer) for c, answer in pairs) / len(expected)

    return judge


def describe(figures: Evaluation, likeness: Likeness | None = None) -> str:
    """The figures in one line."""
    line = f"{figures.tokens_per_forward:.2f} tokens per forward"
    if figures.speedup is not None:
        line += f", {figures.speedup:.2f}x as fast as autoregressive"
    line += (
        f", {figures.fast_forwarded_tokens:.2f} fast-forwarded and {figures.stationary_tokens:.2f} stationary"
    )
    if figures.quality is not None:
        line += f", quality {figures.quality:.3f}"
    if likeness is not None:
        line += (
            f"; of the plain model's answers {likeness.same_answers:.1%} the same, ROUGE-L "
            f"{likeness.rouge_l:.3f}, perplexity {likeness.perplexity:.4f}"
        )
    return line


def _answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    options: TuneOptions,
) -> list[list[int]]:
    from local_backend.engine.engine import Engine
    from local_backend.sequences.sampling import SamplingParams

    with Engine(model, tokenizer) as engine:
        params = SamplingParams(max_tokens=options.collect.max_tokens, temperature=0.0)
        return [completion.token_ids for completion in engine.generate(prompts, params)]


def _evaluate_timed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    options: TuneOptions,
    judge: Quality,
) -> Evaluation:
    return evaluate(
        model,
        tokenizer,
        prompts,
        max_tokens=options.collect.max_tokens,
        block_size=options.collect.block_size,
        quality=judge,
        num_timed=min(16, len(prompts)),
    )


def _describe_counts(counts: Mapping[str, int]) -> str:
    left_out = [f"{count} {fault}" for fault, count in counts.items() if fault != "kept" and count]
    return f"{counts['kept']} trajectories kept, left out: {', '.join(left_out) or 'none'}"
