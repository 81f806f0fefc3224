"""Jacobi trajectories: the engine's guesses on the way to an answer, stored in parts.

A trajectory is an answer (the fixed point) and the block of guesses before each forward (the iterates), as
made by the engine's Jacobi drafter, many prompts at once. Interrupted collection resumes with the first
missing part.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.progress import Progress

from local_backend.drafting import Autoregressive, Drafter, Jacobi, RowView
from local_backend.drafting.draft import Draft, Outcome
from local_backend.drafting.drafter import PerRow
from local_backend.engine.engine import Engine
from local_backend.engine.worker import ThreadMailbox
from local_backend.sequences.outputs import Completion, Trajectory
from local_backend.sequences.sampling import SamplingParams
from local_backend.training.trajectory_store import begin_manifest, progress_bar, write_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Fault = Literal["empty", "unfinished", "repetitive", "broken", "rejected"]
# The last comes only from the caller's filter.
FAULTS: tuple[Fault, ...] = ("empty", "unfinished", "repetitive", "broken", "rejected")

_LONGEST_PERIOD = 24
_LEAST_REPEATED_TOKENS = 24
_LEAST_REPEATS = 4


def fault_of(token_ids: Sequence[int], text: str, *, is_finished: bool) -> Fault | None:
    """Why an answer is left out, ``None`` if it is kept.

    Args:
        token_ids: The answer, its end token included.
        text: Its text.
        is_finished: Whether the model ended it; the end of a truncated answer is no fixed point to learn.
    """
    if len(token_ids) < 2 or not text.strip():
        return "empty"
    if is_repetitive(token_ids):
        return "repetitive"
    if not is_finished:
        return "unfinished"
    if "\N{REPLACEMENT CHARACTER}" in text:
        return "broken"
    return None


def is_repetitive(token_ids: Sequence[int]) -> bool:
    """Whether part of the answer repeats the same few tokens over and over.

    That is a span of at most 24 tokens, at least four times in a row, over at least 24 tokens.
    """
    for period in range(1, _LONGEST_PERIOD + 1):
        run = 0
        wanted = max(_LEAST_REPEATED_TOKENS, period * _LEAST_REPEATS) - period
        for one, other in zip(token_ids, token_ids[period:], strict=False):
            run = run + 1 if one == other else 0
            if run >= wanted:
                return True
    return False


_log = logging.getLogger(__name__)

# Given prompts and answers, whether each answer is worth learning from.
Accept = Callable[[Sequence[Sequence[int]], Sequence[Completion]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """How trajectories are collected.

    Attributes:
        block_size: Guesses in the Jacobi block.
        max_tokens: Maximum tokens of an answer; longer ones are left out.
        max_rows: Answers decoded at once.
        prompts_per_part: Prompts per Parquet file; the most that an interruption loses.
        with_iterates: Whether to decode with Jacobi and store the guesses. Answers alone take a fraction of
            the time, because each forward computes one token a row instead of a block.

    Raises:
        ValueError: A number is less than 1.
    """

    block_size: int = 24
    max_tokens: int = 256
    max_rows: int = 64
    prompts_per_part: int = 512
    with_iterates: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "with_iterates" and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class Recorder:
    """A drafter that records, for each row, the block of guesses another one proposes before each forward.

    Args:
        drafter: The recorded drafter; of its drafts, the first chain is recorded.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._iterates: PerRow[list[tuple[int, tuple[int, ...]]]] = PerRow(lambda _: [])

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """The recorded drafter's drafts."""
        drafts = self.drafter.propose(rows)
        for row, draft in zip(rows, drafts, strict=True):
            start = len(row.token_ids) - row.num_prompt_tokens
            self._iterates[row].append((start, _first_chain(draft)))
        return drafts

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Passed on to the recorded drafter."""
        self.drafter.observe(rows, outcomes)

    def iterates_of(self, row: RowView) -> list[tuple[int, tuple[int, ...]]]:
        """Position in the answer and guesses before each forward of the row."""
        return self._iterates[row]


def _first_chain(draft: Draft) -> tuple[int, ...]:
    length = 0
    while length < len(draft) and draft.parents[length] == length - 1:
        length += 1
    return draft.token_ids[:length]


def decode_recorded(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[tuple[Completion, Trajectory]]:
    """Decode prompts with an engine whose drafter is a :class:`Recorder`; yields in the prompts' order.

    Raises:
        TypeError: The engine's drafter is no :class:`Recorder`.
        ValueError: A prompt is empty or too long; nothing was run then.
    """
    recorder = engine.drafter
    if not isinstance(recorder, Recorder):
        raise TypeError(f"the engine's drafter must be a Recorder, got {type(recorder).__name__}")
    mailboxes = [ThreadMailbox() for _ in prompts]
    rows = [
        engine.make_row(prompt, mailbox.put, params=params)
        for prompt, mailbox in zip(prompts, mailboxes, strict=True)
    ]
    try:
        engine.submit(rows)
        for prompt, row, mailbox in zip(prompts, rows, mailboxes, strict=True):
            completion = mailbox.completion()
            iterates = recorder.iterates_of(row)
            yield (
                completion,
                Trajectory(
                    tuple(prompt),
                    tuple(completion.token_ids),
                    tuple(start for start, _ in iterates),
                    tuple(guess for _, guess in iterates),
                ),
            )
    finally:
        engine.cancel(rows)


def collect_trajectories(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    options: CollectOptions | None = None,
    *,
    accept: Accept | None = None,
    progress: Progress | None = None,
    deadline: float = math.inf,
) -> dict[str, int]:
    """Decode every prompt and store its trajectory; resumes an interrupted call.

    Args:
        model: The model to decode with; see :class:`~local_backend.Engine` for supported models.
        tokenizer: Its tokenizer.
        prompts: Token ids, see :func:`~local_backend.offline.prompt_file.read_prompts`.
        folder: Where to store the trajectories.
        options: How they are collected.
        accept: A filter in addition to the checks for faults: given the prompts and answers of a part,
            returns for each answer whether to keep it.
        progress: Where progress is shown; by default a new bar.
        deadline: No further part is begun after this time, by ``time.monotonic()``.

    Returns:
        Counts: ``"kept"``, and one for each fault for which answers were left out.

    Raises:
        ValueError: The folder holds trajectories of another model, other prompts or other options; or a
            prompt is empty or too long.
        TimeoutError: The deadline has passed; the parts collected until then are kept.
    """
    options = options or CollectOptions()
    manifest = begin_manifest(model, tokenizer, prompts, folder, asdict(options))
    starts = range(0, len(prompts), options.prompts_per_part)
    with progress_bar(progress) as bar:
        task = bar.add_task("trajectories", total=len(prompts))
        jacobi = Jacobi(block_size=options.block_size, num_recycled=0)
        recorder = Recorder(jacobi if options.with_iterates else Autoregressive())
        params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
        with Engine(model, tokenizer, drafter=recorder, max_rows=options.max_rows) as engine:
            for number, start in enumerate(starts):
                part = prompts[start : start + options.prompts_per_part]
                if str(number) in manifest["parts"]:
                    bar.advance(task, len(part))
                    continue
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the time was up after {start} of {len(prompts)} prompts: the same command goes on "
                        "with the others; fewer prompts or a longer time leave some for training"
                    )
                kept: list[Trajectory] = []
                counts = dict.fromkeys(("kept", *FAULTS), 0)
                completions: list[Completion] = []
                trajectories: list[Trajectory] = []
                for completion, trajectory in decode_recorded(engine, part, params):
                    completions.append(completion)
                    trajectories.append(
                        trajectory if options.with_iterates else replace(trajectory, starts=(), iterates=())
                    )
                    bar.advance(task)
                accepted = accept(part, completions) if accept else [True] * len(part)
                for completion, trajectory, is_accepted in zip(
                    completions, trajectories, accepted, strict=True
                ):
                    fault = fault_of(
                        completion.token_ids, completion.text, is_finished=completion.finish_reason == "stop"
                    ) or (None if is_accepted else "rejected")
                    counts[fault or "kept"] += 1
                    if fault is None:
                        kept.append(trajectory)
                write_part(folder, manifest, number, kept, counts)
    counts = dict.fromkeys(("kept", *FAULTS), 0)
    for part_counts in manifest["parts"].values():
        for name, count in part_counts.items():
            counts[name] += count
    left_out = ", ".join(f"{counts[fault]} {fault}" for fault in FAULTS)
    _log.info("%d trajectories kept of %d; left out: %s", counts["kept"], len(prompts), left_out)
    return counts
