"""Jacobi trajectories: the engine's guesses on the way to an answer.

A trajectory is an answer (the fixed point) and the block of guesses before each forward (the iterates), as
made by the engine's Jacobi drafter, many prompts at once. An interrupted collection resumes with the first
prompt whose outcome is not stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tqdm.auto import tqdm

from local_backend.drafting import Autoregressive, Drafter, Jacobi, RowView
from local_backend.drafting.draft import Draft, Outcome
from local_backend.drafting.drafter import PerRow, require_at_least
from local_backend.engine.engine import Engine
from local_backend.engine.worker import ThreadMailbox
from local_backend.sequences.outputs import Completion, Trajectory
from local_backend.sequences.sampling import SamplingParams
from local_backend.training.trajectory_store import KEPT, append_outcomes, resume_collection

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Fault = Literal["empty", "unfinished", "repetitive", "broken", "rejected"]
# The last comes only from the caller's filter.
FAULTS: tuple[Fault, ...] = ("empty", "unfinished", "repetitive", "broken", "rejected")

_LONGEST_PERIOD = 24
_LEAST_REPEATED_TOKENS = 24
_LEAST_REPEATS = 4


def find_fault(completion: Completion) -> Fault | None:
    """Why an answer is left out, ``None`` if it is kept.

    The end of a truncated answer is no fixed point to learn, so only answers that the model ended are kept.
    """
    if len(completion.token_ids) < 2 or not completion.text.strip():
        return "empty"
    if is_repetitive(completion.token_ids):
        return "repetitive"
    if completion.finish_reason != "stop":
        return "unfinished"
    if "\N{REPLACEMENT CHARACTER}" in completion.text:
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


# Given the prompts and answers of a part, whether each answer is worth learning from.
Accept = Callable[[Sequence[Sequence[int]], Sequence[Completion]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """How trajectories are collected.

    Attributes:
        block_size: Guesses in the Jacobi block.
        max_tokens: Maximum tokens of an answer; longer ones are left out.
        max_rows: Answers decoded at once.
        prompts_per_part: Prompts decoded between two writes; the most that an interruption loses.
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
        require_at_least(
            1, **{name: value for name, value in asdict(self).items() if name != "with_iterates"}
        )


class Recorder:
    """Records each row's guesses before each forward, of a drafter that proposes chains, such as Jacobi.

    ``iterates`` are, for each row, the position in the answer and the guesses before each forward.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.iterates: PerRow[list[tuple[int, tuple[int, ...]]]] = PerRow(lambda _: [])

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """The recorded drafter's drafts."""
        drafts = self.drafter.propose(rows)
        for row, draft in zip(rows, drafts, strict=True):
            start = len(row.token_ids) - row.num_prompt_tokens
            self.iterates[row].append((start, draft.token_ids))
        return drafts

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Passed on to the recorded drafter."""
        self.drafter.observe(rows, outcomes)


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
            starts, guesses = zip(*recorder.iterates[row], strict=True)
            yield completion, Trajectory(tuple(prompt), tuple(completion.token_ids), starts, guesses)
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
    deadline: float = math.inf,
) -> dict[str, int]:
    """Decode every prompt and store its trajectory in a folder; resumes an interrupted call.

    ``accept`` filters answers in addition to the checks for faults. After ``deadline``, by
    ``time.monotonic()``, no further part is begun.

    Returns:
        The number of trajectories ``"kept"``, and for each fault that of answers left out.

    Raises:
        ValueError: The folder holds trajectories of another model, other prompts or other options; or a
            prompt is empty or too long.
        TimeoutError: The deadline has passed; what was collected until then is kept.
    """
    folder, options = folder.expanduser(), options or CollectOptions()
    counts = resume_collection(folder, model, tokenizer, prompts, asdict(options))
    jacobi = Jacobi(block_size=options.block_size, num_recycled=0)
    recorder = Recorder(jacobi if options.with_iterates else Autoregressive())
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    with (
        tqdm(total=len(prompts), initial=counts.total(), unit="trajectory", disable=None) as bar,
        Engine(model, tokenizer, drafter=recorder, max_rows=options.max_rows) as engine,
    ):
        while (start := counts.total()) < len(prompts):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the time was up after {start} of {len(prompts)} prompts: the same command goes on with "
                    "the others; fewer prompts or a longer time leave some for training"
                )
            part = prompts[start : start + options.prompts_per_part]
            recorded = []
            for completion, trajectory in decode_recorded(engine, part, params):
                answer = replace(trajectory, starts=(), iterates=())
                recorded.append((completion, trajectory if options.with_iterates else answer))
                bar.update()
            outcomes = _outcomes(part, recorded, accept)
            append_outcomes(folder, outcomes)
            counts.update(one if isinstance(one, str) else KEPT for one in outcomes)
    return {name: counts[name] for name in (KEPT, *FAULTS)}


def _outcomes(
    prompts: Sequence[Sequence[int]], recorded: Sequence[tuple[Completion, Trajectory]], accept: Accept | None
) -> list[Trajectory | Fault]:
    """The trajectory of each prompt, or why its answer is left out."""
    completions = [completion for completion, _ in recorded]
    accepted = accept(prompts, completions) if accept else [True] * len(completions)
    return [
        find_fault(completion) or (trajectory if is_accepted else "rejected")
        for (completion, trajectory), is_accepted in zip(recorded, accepted, strict=True)
    ]
