"""Decoding methods, ours and others', behind one interface: prompts in, token ids and seconds out.

Every call computes on a thread that ends with it. A thread that has computed in parallel keeps its helper
threads, and with more helpers than cores every operation on either side would wait for the OS scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from local_backend import Drafter, Engine, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

PROMPT_LOOKUP_TOKENS = 10


def aside(work: Callable[[], T]) -> T:
    """Run ``work`` on a short-lived thread and wait for it; with a GPU, on this one.

    There the cores do not compute, and ``torch.compile`` keeps CUDA graphs by thread.
    """
    if torch.cuda.is_available():
        return work()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return done.result()


@dataclass(frozen=True)
class Task:
    """One request.

    Attributes:
        prompt: Token ids.
        references: Texts that may be copied.
        target: The answer to force, whatever the model predicts; ``None`` lets the model generate freely.
        num_tokens: Maximum length of the answer.
    """

    prompt: tuple[int, ...]
    references: tuple[str, ...]
    target: tuple[int, ...] | None
    num_tokens: int


@dataclass(frozen=True)
class Run:
    """The result of one decoding method on some tasks.

    Attributes:
        token_ids: Token ids of each answer.
        seconds: Time from the call to the last token.
        decode_seconds: Time from the first tokens of the row that starts last to the last token.
        num_decoded: Tokens generated in that time.
        num_forwards: Decode forwards, summed over the rows; 0 if unknown.
    """

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    decode_seconds: float
    num_decoded: int
    num_forwards: int = 0

    @property
    def seconds_per_token(self) -> float:
        """Decode time per token."""
        return self.decode_seconds / max(1, self.num_decoded)

    @property
    def seconds_per_token_end_to_end(self) -> float:
        """Time per token, prefill included."""
        return self.seconds / max(1, sum(map(len, self.token_ids)))


class ForcedTarget(LogitsProcessor):
    """Forces every row to generate its target by making all other tokens impossible."""

    def __init__(self, num_prompt_tokens: int, targets: Sequence[Sequence[int]], end_token_id: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._targets = [[*target, end_token_id] for target in targets]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[rows, vocabulary]`` that leave one possible token per row."""
        place = input_ids.shape[1] - self._num_prompt_tokens
        forced = torch.full_like(scores, -torch.inf)
        for row, target in enumerate(self._targets):
            forced[row, target[min(place, len(target) - 1)]] = 0.0
        return forced


class _FirstTokens(StoppingCriteria):
    """Records when the first tokens arrive, and how many; never stops generation."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self.seconds = 0.0
        self.num_tokens = 0
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        if not self.num_calls:
            self.seconds = time.perf_counter()
            self.num_tokens = input_ids.shape[1] - self._num_prompt_tokens
        self.num_calls += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_transformers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], **settings: Any
) -> Run:
    """``model.generate``, greedy, all tasks in one padded batch."""
    pad, end = cast("int", tokenizer.pad_token_id), cast("int", tokenizer.eos_token_id)
    width = max(len(task.prompt) for task in tasks)
    padded = [[pad] * (width - len(task.prompt)) + list(task.prompt) for task in tasks]
    input_ids = torch.tensor(padded, device=model.device)
    attention_mask = torch.tensor(
        [[0] * (width - len(task.prompt)) + [1] * len(task.prompt) for task in tasks], device=model.device
    )
    targets = [task.target for task in tasks if task.target is not None]
    processors = LogitsProcessorList([ForcedTarget(width, targets, end)] if targets else [])
    first = _FirstTokens(width)

    def generate() -> tuple[Tensor, float, float]:
        started = time.perf_counter()
        with torch.inference_mode():
            output = cast("Any", model).generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                do_sample=False,
                max_new_tokens=max(task.num_tokens for task in tasks),
                pad_token_id=pad,
                eos_token_id=end,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([first]),
                **settings,
            )
        return output, started, time.perf_counter()

    output, started, ended = aside(generate)
    answers = tuple(
        _until_end(line, end)[: task.num_tokens]
        for line, task in zip(output[:, width:].tolist(), tasks, strict=True)
    )
    num_decoded = sum(len(answer) - min(len(answer), first.num_tokens) for answer in answers)
    return Run(answers, ended - started, ended - first.seconds, num_decoded, first.num_calls * len(tasks))


def run_prompt_lookup(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]
) -> Run:
    """``transformers``' prompt lookup, one task after another: it does not support batches."""
    runs = [
        run_transformers(model, tokenizer, [task], prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)
        for task in tasks
    ]
    return Run(
        tuple(answer for run in runs for answer in run.token_ids),
        sum(run.seconds for run in runs),
        sum(run.decode_seconds for run in runs),
        sum(run.num_decoded for run in runs),
        sum(run.num_forwards for run in runs),
    )


def run_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], drafter: str | Drafter
) -> Run:
    """The engine, all tasks in one batch."""
    end = cast("int", tokenizer.eos_token_id)
    with aside(lambda: Engine(model, tokenizer, drafter=drafter, max_prefix_bytes=0)) as engine:
        aside(lambda: engine.width_costs)  # measured once per model, before timing starts
        params = [
            SamplingParams(
                max_tokens=task.num_tokens,
                logits_processors=()
                if task.target is None
                else (ForcedTarget(len(task.prompt), [task.target], end),),
            )
            for task in tasks
        ]
        started = time.perf_counter()
        completions = engine.generate(
            [task.prompt for task in tasks], params, [list(task.references) or None for task in tasks]
        )
        seconds = time.perf_counter() - started
    answers = tuple(_until_end(list(completion.token_ids), end) for completion in completions)
    first_seconds = max(cast("float", completion.stats.first_token_seconds) for completion in completions)
    ended = max(cast("float", completion.stats.finished_seconds) for completion in completions)
    num_first = sum(completion.stats.tokens_by_forward[0] for completion in completions)
    return Run(
        answers,
        seconds,
        ended - first_seconds,
        sum(map(len, answers)) - num_first,
        sum(completion.stats.num_forwards for completion in completions),
    )


def _until_end(token_ids: Sequence[int], end: int) -> tuple[int, ...]:
    """The answer up to and including its end token."""
    ids = tuple(token_ids)
    return ids[: ids.index(end) + 1] if end in ids else ids
