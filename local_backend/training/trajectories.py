"""Jacobi trajectories: what the engine guesses on its way to an answer, kept in Parquet.

A trajectory is an answer (the fixed point) and the block of guesses before each forward (the iterates), as
the engine's own Jacobi drafter makes them, many prompts at once. Collection that was interrupted goes on
with the first part that is missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rich.progress import Progress

from local_backend.delivery import ThreadMailbox
from local_backend.draft import Draft, Outcome
from local_backend.drafters import Drafter, Jacobi, WritingRow
from local_backend.drafters.per_row import PerRow
from local_backend.engine import Engine
from local_backend.sampling import SamplingParams
from local_backend.sequence import Completion
from local_backend.training.examples import Trajectory
from local_backend.training.filters import FAULTS, fault_of
from local_backend.training.identity import fingerprint
from local_backend.training.progress import progress_bar, without_bars_of_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MANIFEST = "trajectories.json"
_FORMAT = 1
_log = logging.getLogger(__name__)

# Of prompts and answers, whether each answer is worth learning from.
Accept = Callable[[Sequence[Sequence[int]], Sequence[Completion]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """How trajectories are made.

    Attributes:
        block_size: Guesses in flight.
        max_tokens: Tokens of an answer, at most; longer ones are left out.
        max_rows: Answers decoded at once.
        prompts_per_part: Prompts of a Parquet file; what an interruption costs at most.

    Raises:
        ValueError: A number is less than 1.
    """

    block_size: int = 24
    max_tokens: int = 256
    max_rows: int = 64
    prompts_per_part: int = 512

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class Recorder:
    """A drafter that notes, for each row, the block of guesses another one proposes before each forward.

    Args:
        drafter: Whose guesses are noted: the chain its drafts begin with.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._iterates: PerRow[list[tuple[int, tuple[int, ...]]]] = PerRow(lambda _: [])

    def propose(self, rows: Sequence[WritingRow]) -> Sequence[Draft]:
        """The other's drafts."""
        drafts = self.drafter.propose(rows)
        for row, draft in zip(rows, drafts, strict=True):
            start = len(row.token_ids) - row.num_prompt_tokens
            self._iterates[row].append((start, _first_chain(draft)))
        return drafts

    def observe(self, rows: Sequence[WritingRow], outcomes: Sequence[Outcome]) -> None:
        """Passed on."""
        self.drafter.observe(rows, outcomes)

    def iterates_of(self, row: WritingRow) -> list[tuple[int, tuple[int, ...]]]:
        """Place in the answer and guesses before each forward of the row."""
        return self._iterates[row]


def _first_chain(draft: Draft) -> tuple[int, ...]:
    length = 0
    while length < len(draft) and draft.parents[length] == length - 1:
        length += 1
    return draft.token_ids[:length]


def decode_recorded(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[tuple[Completion, Trajectory]]:
    """Decode prompts with an engine whose drafter is a :class:`Recorder`, in their order.

    Raises:
        TypeError: The engine's drafter records nothing.
        ValueError: A prompt is empty or too long; nothing has run then.
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
            completion = None
            while completion is None:
                update = mailbox.get()
                if update.error is not None:
                    raise update.error
                completion = update.completion
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
) -> dict[str, int]:
    """Decode every prompt and store its trajectory; goes on where an interrupted call left off.

    Args:
        model: Whose trajectories; see :class:`~local_backend.Engine` for which models can be decoded.
        tokenizer: Its tokenizer.
        prompts: Token ids, see :func:`~local_backend.training.prompts.read_prompts`.
        folder: Where they go.
        options: How they are made.
        accept: Which answers are worth learning from, beside the faults that are always looked for: given the
            prompts and answers of a part, says of each whether it is kept.
        progress: Where progress is shown; a bar of its own unless given.

    Returns:
        Counts: ``"kept"``, and one of each fault for which answers were left out.

    Raises:
        ValueError: The folder holds trajectories of another model, other prompts or other options; or a
            prompt is empty or too long.
    """
    options = options or CollectOptions()
    manifest = _manifest_for(model, tokenizer, prompts, folder, options)
    starts = range(0, len(prompts), options.prompts_per_part)
    with progress_bar(progress) as bar:
        task = bar.add_task("trajectories", total=len(prompts))
        recorder = Recorder(Jacobi(block_size=options.block_size, num_recycled=0))
        params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
        with Engine(model, tokenizer, drafter=recorder, max_rows=options.max_rows) as engine:
            for number, start in enumerate(starts):
                part = prompts[start : start + options.prompts_per_part]
                if str(number) in manifest["parts"]:
                    bar.advance(task, len(part))
                    continue
                kept: list[Trajectory] = []
                counts = dict.fromkeys(("kept", *FAULTS), 0)
                completions: list[Completion] = []
                trajectories: list[Trajectory] = []
                for completion, trajectory in decode_recorded(engine, part, params):
                    completions.append(completion)
                    trajectories.append(trajectory)
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
                _write_part(folder / f"part-{number:05d}.parquet", kept)
                manifest["parts"][str(number)] = counts
                _write_manifest(folder, manifest)
    counts = dict.fromkeys(("kept", *FAULTS), 0)
    for part_counts in manifest["parts"].values():
        for name, count in part_counts.items():
            counts[name] += count
    left_out = ", ".join(f"{counts[fault]} {fault}" for fault in FAULTS)
    _log.info("%d trajectories kept of %d; left out: %s", counts["kept"], len(prompts), left_out)
    return counts


class StoredTrajectories(Sequence[Trajectory]):
    """Trajectories in a folder, read from disk one by one as they are asked for.

    Args:
        folder: Where :func:`collect_trajectories` put them.
        model: The model they are to be of; ``None`` for whichever.
        tokenizer: Its tokenizer.

    Raises:
        FileNotFoundError: The folder holds no trajectories.
        ValueError: They are another model's, or none was kept.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        from datasets import Dataset

        manifest = read_manifest(folder)
        if model is not None and tokenizer is not None:
            _check_fingerprint(folder, manifest, fingerprint(model, tokenizer))
        parts = [folder / f"part-{int(number):05d}.parquet" for number in sorted(manifest["parts"], key=int)]
        kept = sum(counts["kept"] for counts in manifest["parts"].values())
        if not kept:
            raise ValueError(
                f"{folder} holds no trajectory that was kept ({manifest['parts']}): does the model end its "
                "answers within max_tokens?"
            )
        with without_bars_of_datasets():
            self._dataset: Any = Dataset.from_parquet(
                [str(part) for part in parts], cache_dir=str(folder / "cache")
            )
        self.lengths: list[int] = list(self._dataset["num_tokens"])

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, place: int) -> Trajectory: ...
    @overload
    def __getitem__(self, place: slice) -> list[Trajectory]: ...
    def __getitem__(self, place: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        record = self._dataset[place]
        return Trajectory(
            tuple(record["prompt_ids"]),
            tuple(record["answer_ids"]),
            tuple(record["starts"]),
            tuple(map(tuple, record["iterates"])),
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder of trajectories says of itself.

    Raises:
        FileNotFoundError: It holds none.
        ValueError: They were written in a format this version does not know.
    """
    path = folder / _MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} holds no trajectories ({_MANIFEST} is missing): collect them first"
        )
    manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is of format {manifest.get('format')}, this version reads {_FORMAT}: collect them anew"
        )
    return manifest


def _manifest_for(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    options: CollectOptions,
) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps([list(map(int, prompt)) for prompt in prompts]).encode())
    wanted = {
        "format": _FORMAT,
        "fingerprint": fingerprint(model, tokenizer),
        "prompts": {"count": len(prompts), "digest": digest.hexdigest()[:16]},
        "options": asdict(options),
    }
    if not (folder / _MANIFEST).exists():
        return {**wanted, "parts": {}}
    found = read_manifest(folder)
    _check_fingerprint(folder, found, str(wanted["fingerprint"]))
    for name in ("prompts", "options"):
        if found[name] != wanted[name]:
            raise ValueError(
                f"{folder} holds trajectories of other {name}: {found[name]}, asked for {wanted[name]}. "
                "Give another folder, or delete it"
            )
    return found


def _check_fingerprint(folder: Path, manifest: dict[str, Any], wanted: str) -> None:
    if manifest["fingerprint"] != wanted:
        raise ValueError(
            f"{folder} holds trajectories of another model: their fingerprint is {manifest['fingerprint']}, "
            f"this model's is {wanted}. Collect this model's own, in another folder"
        )


def _write_part(path: Path, trajectories: Sequence[Trajectory]) -> None:
    from datasets import Dataset, Features, List, Value

    token = Value("int32")
    features = Features(
        {
            "prompt_ids": List(token),
            "answer_ids": List(token),
            "starts": List(token),
            "iterates": List(List(token)),
            "num_tokens": token,
        }
    )
    columns = {
        "prompt_ids": [trajectory.prompt_ids for trajectory in trajectories],
        "answer_ids": [trajectory.answer_ids for trajectory in trajectories],
        "starts": [trajectory.starts for trajectory in trajectories],
        "iterates": [trajectory.iterates for trajectory in trajectories],
        "num_tokens": [trajectory.num_tokens for trajectory in trajectories],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with without_bars_of_datasets():
        Dataset.from_dict(columns, features=features).to_parquet(str(unfinished))
    unfinished.replace(path)


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    unfinished = folder / f"{_MANIFEST}.unfinished"
    unfinished.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(folder / _MANIFEST)
