"""Trajectories on disk: Parquet files, and a manifest of their model, prompts, options and finished parts.

Knows files. Does not know how trajectories are collected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from local_backend.sequences.outputs import Trajectory
from local_backend.training.checkpoints import refuse_other, write_whole
from local_backend.training.examples import lengths_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_SAMPLED_VALUES = 4096  # of each tensor; any training step changes nearly all of them
_NUM_DIGESTED = 256  # trajectories hashed in full; of the others only the lengths


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of names, shapes and evenly spaced values of the model's weights, and of the vocabulary.

    It does not depend on the dtype or device that the same values are loaded with.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().reshape(-1)
        step = max(1, len(values) // _SAMPLED_VALUES)
        sampled = values[::step].to("cpu", torch.float32).contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sampled.numpy().tobytes())
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{number}\0{token}\0".encode())
    return digest.hexdigest()[:16]


def digest_of_prompts(prompts: Sequence[Sequence[int]]) -> str:
    """A digest that identifies prompts."""
    token_ids = json.dumps([list(map(int, prompt)) for prompt in prompts])
    return hashlib.sha256(token_ids.encode()).hexdigest()[:16]


def digest_of(trajectories: Sequence[Trajectory]) -> str:
    """A digest that identifies trajectories: the lengths of all, the tokens of some, evenly spaced."""
    digest = hashlib.sha256(json.dumps(lengths_of(trajectories)).encode())
    for place in range(0, len(trajectories), max(1, len(trajectories) // _NUM_DIGESTED)):
        one = trajectories[place]
        digest.update(repr((one.prompt_ids, one.answer_ids, one.starts, one.iterates)).encode())
    return digest.hexdigest()[:16]


_MANIFEST = "trajectories.json"
_FORMAT = 1


class StoredTrajectories(Sequence[Trajectory]):
    """Trajectories in a folder, read from disk one by one on access.

    Args:
        folder: Where :func:`~local_backend.training.trajectories.collect_trajectories` stored them.
        model: The model they must come from; ``None`` for any.
        tokenizer: Its tokenizer.

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
        from datasets import Dataset

        manifest = read_manifest(folder)
        if model is not None and tokenizer is not None:
            _check_fingerprint(folder, manifest, fingerprint(model, tokenizer))
        parts = [part_of(folder, number) for number in sorted(map(int, manifest["parts"]))]
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
    """Read the manifest of a folder of trajectories.

    Raises:
        FileNotFoundError: The folder holds no trajectories.
        ValueError: They were written in a format this version does not read.
    """
    path = folder / _MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} holds no trajectories ({_MANIFEST} is missing): collect them first"
        )
    manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is of format {manifest.get('format')}, this version reads {_FORMAT}: collect them again"
        )
    return manifest


def begin_manifest(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of a collection: the folder's own, if it already holds part of the same collection.

    Raises:
        ValueError: The folder holds trajectories of another model, other prompts or other options.
    """
    wanted = {
        "format": _FORMAT,
        "fingerprint": fingerprint(model, tokenizer),
        "prompts": {"count": len(prompts), "digest": digest_of_prompts(prompts)},
        "options": dict(options),
    }
    if not (folder / _MANIFEST).exists():
        return {**wanted, "parts": {}}
    found = read_manifest(folder)
    _check_fingerprint(folder, found, str(wanted["fingerprint"]))
    # Answers are the same however many are decoded at once.
    refuse_other(folder, found, wanted, may_differ={"parts", "options.max_rows"})
    return found


def _check_fingerprint(folder: Path, manifest: dict[str, Any], wanted: str) -> None:
    if manifest["fingerprint"] != wanted:
        raise ValueError(
            f"{folder} holds trajectories of another model: their fingerprint is {manifest['fingerprint']}, "
            f"this model's is {wanted}. Collect this model's own, in another folder"
        )


def write_part(
    folder: Path,
    manifest: dict[str, Any],
    number: int,
    trajectories: Sequence[Trajectory],
    counts: Mapping[str, int],
) -> None:
    """Write one part, then record it in the manifest."""
    _write_parquet(part_of(folder, number), trajectories)
    manifest["parts"][str(number)] = dict(counts)
    write_whole(folder / _MANIFEST, json.dumps(manifest, indent=1) + "\n")


def part_of(folder: Path, number: int) -> Path:
    """The file of a part."""
    return folder / f"part-{number:05d}.parquet"


def _write_parquet(path: Path, trajectories: Sequence[Trajectory]) -> None:
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


@contextmanager
def progress_bar(progress: Progress | None = None) -> Iterator[Progress]:
    """The given bar, or a new one that is shown until the end of the block."""
    if progress is not None:
        yield progress
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar


@contextmanager
def without_bars_of_datasets() -> Iterator[None]:
    """Disable progress bars of ``datasets``: reading or writing a part takes only a moment."""
    import datasets

    were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()
