"""Resumable work: checks that a folder holds the same work, and writes files atomically.

Knows folders, and in which order files are written. Does not know what the work is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MARKER = "config.json"  # of a model's folder; written last


def claim(path: Path, wanted: Mapping[str, Any], *, may_differ: Collection[str] = ()) -> None:
    """Start the work described by ``path``, or check that it may be resumed.

    Args:
        path: A JSON file; written if it does not exist.
        wanted: Settings the work depends on; mappings may be nested.
        may_differ: Dotted names ("options.save_steps") of settings that may change when work is resumed,
            because the result does not depend on them.

    Raises:
        ValueError: The file describes other work; says what differs.
    """
    if path.exists():
        refuse_other(path.parent, json.loads(path.read_text("utf-8")), wanted, may_differ=may_differ)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(wanted, indent=1) + "\n")


def refuse_other(
    folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], *, may_differ: Collection[str] = ()
) -> None:
    """Check that the work found in a folder is the one wanted.

    Raises:
        ValueError: It is not; says what differs.
    """
    # Through JSON, which turns tuples into lists.
    differing = list(_differences(found, json.loads(json.dumps(wanted)), may_differ))
    if differing:
        told = "; ".join(f"{name} {was} (asked for {now})" for name, was, now in differing)
        raise ValueError(
            f"{folder} holds work with other settings: {told}. Give another folder, or delete it"
        )


def _differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any], may_differ: Collection[str], around: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*wanted, *found)):
        was, now = found.get(name), wanted.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, may_differ, f"{around}{name}.")
        elif was != now and f"{around}{name}" not in may_differ:
            yield f"{around}{name}", was, now


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a kill leaves the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer; :func:`has_model` is true only once all of it is written."""
    (folder / _MARKER).unlink(missing_ok=True)
    unfinished = folder / "unfinished"
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == _MARKER):
        if path.is_dir():  # additional chat templates; `replace` fails if the target is not empty
            shutil.rmtree(folder / path.name, ignore_errors=True)
        path.replace(folder / path.name)
    unfinished.rmdir()


def has_model(folder: Path) -> bool:
    """Whether :func:`write_model` has completed there."""
    return (folder / _MARKER).exists()


def newest_checkpoint(folder: Path) -> str | None:
    """The last complete checkpoint of ``transformers.Trainer``, ``None`` if there is none.

    ``Trainer`` itself takes the last one, complete or not: after a kill during a save it could not resume.
    """
    numbered = [(int(path.name.partition("-")[2]), path) for path in folder.glob("checkpoint-*")]
    for _, path in sorted(numbered, reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text("utf-8"))  # written last
        except (OSError, ValueError):
            continue
        return str(path)
    return None
