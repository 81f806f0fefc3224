"""Resumable work: what it depends on, whether a folder holds the same work, and files written atomically.

Knows folders, and in which order files are written. Does not know what the work is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MARKER = "config.json"  # of a model's folder; written last
_SAMPLED_VALUES = 4096  # of each tensor; any training step changes nearly all of them


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of names, shapes and evenly spaced values of the model's weights, and of the vocabulary.

    It does not depend on the dtype or device that the same values are loaded with.
    """
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().reshape(-1)
        sampled = values[:: max(1, len(values) // _SAMPLED_VALUES)].cpu().float().contiguous()
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(sampled.numpy().tobytes())
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        sha.update(f"{number}\0{token}\0".encode())
    return sha.hexdigest()[:16]


def digest(items: Iterable[object]) -> str:
    """A digest of values by their ``repr``, in order."""
    sha = hashlib.sha256()
    for item in items:
        sha.update(repr(item).encode())
    return sha.hexdigest()[:16]


def claim(path: Path, wanted: Mapping[str, Any], *, may_differ: Collection[str] = ()) -> None:
    """Write the settings that work depends on to a new JSON file, or check that they are those of the old.

    Settings in ``may_differ``, by their dotted names ("options.save_steps"), may change: the result does not
    depend on them.

    Raises:
        ValueError: The file describes other work; says what differs.
    """
    if not path.exists():
        write_whole(path, json.dumps(wanted, indent=1) + "\n")
        return
    found = dict(_flat(json.loads(path.read_text("utf-8"))))
    asked = dict(_flat(json.loads(json.dumps(wanted))))  # through JSON, which turns tuples into lists
    differing = [
        f"{name} {found.get(name)} (asked for {asked.get(name)})"
        for name in dict.fromkeys((*asked, *found))
        if found.get(name) != asked.get(name) and name not in may_differ
    ]
    if differing:
        raise ValueError(
            f"{path.parent} holds work with other settings: {'; '.join(differing)}. "
            "Give another folder, or delete it"
        )


def _flat(settings: Mapping[str, Any], around: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting with its dotted name."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{around}{name}.")
        else:
            yield f"{around}{name}", value


def write_whole(path: Path, content: Any) -> None:
    """Write text, or what ``torch.save`` takes, atomically: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    if isinstance(content, str):
        unfinished.write_text(content, encoding="utf-8")
    else:
        torch.save(content, unfinished)
    unfinished.replace(path)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer; there is a ``config.json`` only once all of it is written."""
    (folder / _MARKER).unlink(missing_ok=True)
    unfinished = folder / "unfinished"
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == _MARKER):
        if path.is_dir():  # additional chat templates; `replace` fails if the target is not empty
            shutil.rmtree(folder / path.name, ignore_errors=True)
        path.replace(folder / path.name)
    unfinished.rmdir()
