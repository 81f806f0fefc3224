"""Removes a model's reasoning from its reply, while the reply is streamed.

Reasoning models print their thoughts before the answer, between tags. If the chat template opens the block,
the reply begins inside it and only the closing tag is seen. A text that merely mentions a tag is left as it
is. Pure functions of text. Does not know models.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.resources import files

_TAGS = tomllib.loads(files("sot_chains.filters").joinpath("reasoning.toml").read_text("utf-8"))
_BLOCKS, _UNCERTAIN_BLOCKS = _TAGS["blocks"], _TAGS["uncertain"]
_ANSWER_STARTS, _ANSWER_ENDS = _TAGS["answer"].values()
_CLOSINGS = [closing for closing in _BLOCKS.values() if closing not in ("<|end|>", "<channel|>")]
_QUOTES = tuple("`'\"“”‘’«»()（）「」")


def _any_of(tags: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)), re.IGNORECASE)


_OPENING, _CLOSING = _any_of(_BLOCKS), _any_of(_CLOSINGS)
_TAG_START = re.compile(r"[<\[◁]")  # with which all tags begin, and which none has further on
_NO_TEXT = re.compile(r"[\s<\[◁ah]|\Z", re.IGNORECASE)  # what may stand before text, or begin a block


class ReasoningFilter:
    """Takes the raw pieces of a reply and gives back those of the answer.

    Args:
        is_open: Whether the reply is known to begin inside a block of reasoning.

    Attributes:
        reasoning: The reasoning so far.
        has_discarded: Whether what the last :meth:`feed` or an earlier one gave back turned out to be
            reasoning, because only its closing tag was there. To be set back by the reader.
        was_open: Whether the reply has turned out to begin inside a block.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.reasoning = ""
        self.has_discarded = self.was_open = False
        self._opening: str | None = "" if is_open else None  # of the block that is being read
        self._at_start = True
        self._is_answer = False  # whether reasoning came before the text
        self._held = ""
        self._given: list[str] = []

    def feed(self, piece: str) -> str:
        """The text of the answer that is certain now."""
        if not self._held and self._opening is None and not _TAG_START.search(piece):
            if self._at_start and not self._is_answer and not _NO_TEXT.match(piece):
                self._at_start = False
            if not self._at_start:  # the usual case
                self._given.append(piece)
                return piece
        self._held += piece
        return self._read(is_last=False)

    def end(self) -> str:
        """The rest, after the last piece."""
        return self._read(is_last=True) if self._held or self._opening is not None else ""

    def _read(self, *, is_last: bool) -> str:
        while True:
            if self._opening is not None:
                given = self._skip(self._opening, is_last=is_last)
            elif self._at_start:
                given = self._start(is_last=is_last)
            else:
                given = self._pass(is_last=is_last)
            if given is not None:
                self._given.append(given)
                return given

    # Each of the states takes what it can of the held text. It returns what is given out, or ``None`` if the
    # rest is for another state.

    def _start(self, *, is_last: bool) -> str | None:
        """At the beginning of the reply, or of what follows a block of reasoning."""
        text = self._held.lstrip()
        tags = [*_BLOCKS, *_UNCERTAIN_BLOCKS, *(_ANSWER_STARTS if self._is_answer else ())]
        for tag in tags:
            if _begins(text, tag) and (tag != "analysis" or text[len(tag) :][:1].isupper()):
                self._held = text[len(tag) :]
                self._opening = None if tag in _ANSWER_STARTS else tag
                return None
        if not is_last and any(_begins(tag, text) for tag in tags):
            return ""
        if self._is_answer:
            self._held = text
        self._at_start = False
        return None

    def _skip(self, opening: str, *, is_last: bool) -> str | None:
        """Inside a block of reasoning."""
        is_certain = opening in _BLOCKS
        closings = [_BLOCKS[opening]] if is_certain else [_UNCERTAIN_BLOCKS.get(opening, "")]
        pattern = _any_of(closings) if opening else _CLOSING
        if found := pattern.search(self._held):
            self.reasoning += self._held[: found.start()]
            self._held, self._opening = self._held[found.end() :], None
            self._at_start = self._is_answer = True
            return None
        if is_certain:
            end = len(self._held) if is_last else _find_begun(self._held, closings)
            self.reasoning += self._held[:end]
            self._held = self._held[end:]
        elif is_last:  # no block after all
            self._held, self._opening, self._at_start = opening + self._held, None, False
            return None
        return ""

    def _pass(self, *, is_last: bool) -> str | None:
        """In the text of the answer."""
        for tag in _ANSWER_ENDS if self._is_answer else ():
            self._held = self._held.replace(tag, "")
        end = len(self._held) if is_last else _find_begun(self._held, [*_CLOSINGS, *_ANSWER_ENDS])
        for closing in _CLOSING.finditer(self._held):
            before, after = self._held[: closing.start()], self._held[closing.end() :]
            if not is_last and not after.strip(" \t"):  # what follows tells whether it is a mention
                end = closing.start()
                break
            before = "".join([*self._given, before])
            if not self._is_answer and _closes(before, after):
                self.reasoning += before
                self.has_discarded = self.has_discarded or any(self._given)
                self._held = after
                self._given.clear()
                self.was_open = self._at_start = self._is_answer = True
                return None
        given, self._held = self._held[:end], self._held[end:]
        return given


def _closes(before: str, after: str) -> bool:
    """Whether a closing tag between these ends reasoning, and is not a mention of the tag."""
    if _OPENING.search(before) or before.endswith(_QUOTES) or after.startswith(_QUOTES):
        return False
    line = before.rpartition("\n")[2].rstrip()
    return not line or not after.partition("\n")[0].strip() or line[-1] in ".!?。！？:"


def _begins(text: str, beginning: str) -> bool:
    return text[: len(beginning)].lower() == beginning.lower()


def _find_begun(text: str, tags: Iterable[str]) -> int:
    """Where the beginning of one of ``tags`` stands at the end of ``text``; its length if there is none."""
    start = max(map(text.rfind, "<[◁"))
    return start if start >= 0 and any(_begins(tag, text[start:]) for tag in tags) else len(text)
