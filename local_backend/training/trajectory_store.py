"""Trajectories on disk: JSON lines, appended as they are decoded.

``collection.json`` says what they depend on: model, prompts and options. Line ``k`` of ``trajectories.jsonl``
is the outcome of prompt ``k``: its trajectory, or the fault for which its answer was left out. So the number
of lines says which prompt comes next.

Knows files. Does not know how trajectories are collected.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from local_backend.sequences.outputs import Trajectory
from local_backend.training.checkpoints import claim, digest, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SETTINGS, _OUTCOMES = "collection.json", "trajectories.jsonl"
KEPT = "kept"


class StoredTrajectories:
    """The trajectories kept in a folder, read from disk one by one; of ``model`` alone, if given.

    Raises:
        FileNotFoundError: The folder holds no trajectories.
        ValueError: They come from another model, or none was kept.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        folder = folder.expanduser()
        settings = folder / _SETTINGS
        if not settings.exists():
            raise FileNotFoundError(
                f"{folder} holds no trajectories ({_SETTINGS} is missing): collect them first"
            )
        if model is not None and tokenizer is not None:
            found, wanted = json.loads(settings.read_text("utf-8"))["model"], fingerprint(model, tokenizer)
            if found != wanted:
                raise ValueError(
                    f"{folder} holds trajectories of another model: their fingerprint is {found}, this "
                    f"model's is {wanted}. Collect this model's own, in another folder"
                )
        self._path = folder / _OUTCOMES
        self._offsets = [offset for offset, _, record in _outcomes(self._path) if "fault" not in record]
        if not self._offsets:
            raise ValueError(
                f"{folder} holds no trajectory that was kept: does the model end its answers within "
                "max_tokens?"
            )

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[Trajectory]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int, /) -> Trajectory:
        with self._path.open("rb") as file:
            file.seek(self._offsets[number])
            record = json.loads(file.readline())
        return Trajectory(
            tuple(record["prompt_ids"]),
            tuple(record["answer_ids"]),
            tuple(record["starts"]),
            tuple(map(tuple, record["iterates"])),
        )


def resume_collection(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
) -> Counter[str]:
    """Start or resume a collection; counts the outcomes it already holds, by fault or as ``"kept"``.

    Raises:
        ValueError: The folder holds trajectories of another model, other prompts or other options.
    """
    wanted = {
        "model": fingerprint(model, tokenizer),
        "prompts": {"count": len(prompts), "digest": digest(map(list, prompts))},
        "options": dict(options),
    }
    # Answers are the same however many are decoded at once.
    claim(folder / _SETTINGS, wanted, may_differ={"options.max_rows", "options.prompts_per_part"})
    path, end, counts = folder / _OUTCOMES, 0, Counter[str]()
    path.touch()
    for offset, size, record in _outcomes(path):
        counts[record.get("fault", KEPT)] += 1
        end = offset + size
    os.truncate(path, end)  # a line that a kill cut off
    return counts


def append_outcomes(folder: Path, outcomes: Iterable[Trajectory | str]) -> None:
    """Append the outcomes of the next prompts: a trajectory each, or a fault."""
    records = (asdict(one) if isinstance(one, Trajectory) else {"fault": one} for one in outcomes)
    with (folder / _OUTCOMES).open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def _outcomes(path: Path) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Offset, size and record of each whole line."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield offset, len(line), json.loads(line)
            offset += len(line)
