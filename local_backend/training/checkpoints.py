"""Work that goes on where it was: whose it is, and files that are there whole or not at all.

Knows folders, and in which order files are written. Does not know what is worked on.
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
    """Begin the work that ``path`` tells of, or go on with it.

    Args:
        path: A JSON file; where there is none, it is written.
        wanted: What the work depends on; options of options may lie in mappings.
        may_differ: Names, with those of the mappings around them ("options.save_steps"), of what may be
            another when work goes on, because the result does not depend on it.

    Raises:
        ValueError: The file is of other work; says what differs.
    """
    if path.exists():
        refuse_other(path.parent, json.loads(path.read_text("utf-8")), wanted, may_differ=may_differ)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(wanted, indent=1) + "\n")


def refuse_other(
    folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], *, may_differ: Collection[str] = ()
) -> None:
    """See that work found in a folder is the one that is wanted.

    Raises:
        ValueError: It is not; says what differs.
    """
    # As JSON keeps it: without tuples.
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
    """Write a file so that a kill leaves the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer so that :func:`has_model` is true of the whole alone."""
    (folder / _MARKER).unlink(missing_ok=True)
    unfinished = folder / "unfinished"
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == _MARKER):
        if path.is_dir():  # chat templates beside the first; it does not replace one that holds something
            shutil.rmtree(folder / path.name, ignore_errors=True)
        path.replace(folder / path.name)
    unfinished.rmdir()


def has_model(folder: Path) -> bool:
    """Whether :func:`write_model` has written one there, to its end."""
    return (folder / _MARKER).exists()


def newest_checkpoint(folder: Path) -> str | None:
    """The last of ``transformers.Trainer``'s checkpoints that is whole, ``None`` where there is none.

    ``Trainer`` itself takes the last, whole or not: a kill while one was written would end the training.
    """
    numbered = [(int(path.name.partition("-")[2]), path) for path in folder.glob("checkpoint-*")]
    for _, path in sorted(numbered, reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text("utf-8"))  # written last
        except (OSError, ValueError):
            continue
        return str(path)
    return None
