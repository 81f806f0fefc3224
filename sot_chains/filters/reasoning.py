"""Removes a model's reasoning from its reply, while the reply is streamed.

Reasoning models print their thoughts before the answer, between tags. If the chat template opens the block,
the reply begins inside it and only the closing tag is seen. A text that merely mentions a tag is left as it
is. Pure functions of text. Does not know models.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class _Block(NamedTuple):
    opening: str
    closing: str
    is_certain: bool = True  # whether an opening without a closing is reasoning to the end


# DeepSeek-R1, Qwen3 and many more; Magistral; Kimi; Seed; Sky-T1; Cohere; gpt-oss; Gemma; Granite. The last
# but one is gpt-oss behind a server that drops special tokens.
_BLOCKS = (
    *(
        _Block(f"<{name}>", f"</{name}>")
        for name in ("think", "thinking", "thought", "reasoning", "analysis")
    ),
    _Block("<seed:think>", "</seed:think>"),
    _Block("[THINK]", "[/THINK]"),
    _Block("◁think▷", "◁/think▷"),
    _Block("<|begin_of_thought|>", "<|end_of_thought|>"),
    _Block("<|START_THINKING|>", "<|END_THINKING|>"),
    _Block("<|channel|>analysis<|message|>", "<|end|>"),
    _Block("<|channel|>commentary<|message|>", "<|end|>"),
    _Block("<|channel>thought", "<channel|>"),
    _Block("<unused94>thought", "<unused95>"),
    _Block("analysis", "assistantfinal", is_certain=False),
    _Block("Here is my thought process:", "Here is my response:", is_certain=False),
)
# What may stand around the answer that follows reasoning.
_ANSWER = re.compile(
    r"\s*(?:<answer>|<response>|<\|begin_of_solution\|>|<\|START_RESPONSE\|>|"
    r"<\|start\|>assistant<\|channel\|>final<\|message\|>|<\|channel\|>final<\|message\|>)",
    re.IGNORECASE,
)
_ANSWER_STARTS = (
    *("<answer>", "<response>", "<|begin_of_solution|>", "<|START_RESPONSE|>"),
    *("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
)
_ANSWER_ENDS = (
    *("</answer>", "</response>", "<|end_of_solution|>", "<|END_RESPONSE|>", "<|return|>", "<|end|>"),
)
_CERTAIN = [block for block in _BLOCKS if block.is_certain]
_LONE_CLOSINGS = tuple(block.closing for block in _CERTAIN if block.closing not in ("<|end|>", "<channel|>"))
_LONE = re.compile("|".join(map(re.escape, _LONE_CLOSINGS)), re.IGNORECASE)
_OPENING = re.compile("|".join(re.escape(block.opening) for block in _CERTAIN), re.IGNORECASE)
_LONGEST_TAG = max(len(block.closing) for block in _BLOCKS)
_FIRST_CHARACTERS = "".join({block.opening[0] for block in _BLOCKS}).lower()
_NO_TEXT = f"{_FIRST_CHARACTERS} \t\r\n"  # what the text of an answer does not begin with, as far as is known
_QUOTES = "`'\"“”‘’«»()（）「」"


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
        self.has_discarded = False
        self.was_open = False
        self._block: _Block | None = _Block("", "</think>", is_certain=False) if is_open else None
        self._is_implicit = is_open
        self._at_start = True
        self._is_answer = False  # whether reasoning came before the text
        self._held = ""
        self._given: list[str] = []

    def feed(self, piece: str) -> str:
        """The text of the answer that is certain now."""
        if not self._held and self._block is None and not ("<" in piece or "[" in piece or "◁" in piece):
            if self._at_start and not self._is_answer and piece[:1].lower() not in _NO_TEXT:
                self._at_start = False
            if not self._at_start:  # the usual case
                self._given.append(piece)
                return piece
        self._held += piece
        return self._read(is_last=False)

    def end(self) -> str:
        """The rest, after the last piece."""
        return self._read(is_last=True) if self._held or self._block else ""

    def _read(self, *, is_last: bool) -> str:
        given: list[str] = []
        while True:
            if self._block is not None:
                goes_on = self._skip(self._block, is_last=is_last)
            elif self._at_start:
                goes_on = self._start(is_last=is_last)
            else:
                goes_on = self._pass(given, is_last=is_last)
            if not goes_on:
                self._given += given
                return "".join(given)

    def _start(self, *, is_last: bool) -> bool:
        """At the beginning of the reply, or of what follows a block of reasoning."""
        text = self._held.lstrip()
        if text and not self._is_answer and text[0].lower() not in _FIRST_CHARACTERS:
            self._at_start = False  # the usual case
            return True
        if self._is_answer and (answer := _ANSWER.match(self._held)):
            self._held = self._held[answer.end() :]
            return True
        for block in _BLOCKS:
            if text[: len(block.opening)].lower() == block.opening.lower() and self._opens(block, text):
                self._block = block
                self._held = text[len(block.opening) :]
                return True
        starts = [block.opening for block in _BLOCKS] + list(_ANSWER_STARTS if self._is_answer else ())
        if not is_last and any(_may_become(text, start) for start in starts):
            return False
        if self._is_answer:
            self._held = text
        self._at_start = False
        return bool(self._held)

    def _opens(self, block: _Block, text: str) -> bool:
        following = text[len(block.opening) :][:1]
        return block.opening != "analysis" or following.isupper()

    def _skip(self, block: _Block, *, is_last: bool) -> bool:
        """Inside a block of reasoning."""
        closings = _LONE_CLOSINGS if self._is_implicit else (block.closing,)
        places = [
            (place, closing)
            for closing in closings
            if (place := self._held.lower().find(closing.lower())) >= 0
        ]
        if places:
            place, closing = min(places)
            self.reasoning += self._held[:place]
            self._held = self._held[place + len(closing) :]
            self._block, self._is_implicit = None, False
            self._at_start = self._is_answer = True
            return True
        if block.is_certain:  # the end of a tag may be on its way
            kept = 0 if is_last else _length_of_beginning(self._held, closings)
            cut = len(self._held) - kept
            self.reasoning += self._held[:cut]
            self._held = self._held[cut:]
        elif is_last:  # no block after all
            self._held = block.opening + self._held
            self._block, self._is_implicit, self._at_start = None, False, False
            return bool(self._held)
        return False

    def _pass(self, given: list[str], *, is_last: bool) -> bool:
        """In the text of the answer."""
        if not _has_tag_start(self._held):  # the usual case
            given.append(self._held)
            self._held = ""
            return False
        for end in _ANSWER_ENDS if self._is_answer else ():
            self._held = self._held.replace(end, "")
        searched = 0
        while closing := _LONE.search(self._held, searched):
            if not is_last and not self._held[closing.end() :].strip(" \t"):
                break  # what follows tells whether it is a mention
            before = "".join([*self._given, *given, self._held[: closing.start()]])
            if self._closes(before, self._held[closing.end() :]):
                self.reasoning += before
                self.has_discarded = self.has_discarded or bool(self._given)
                self.was_open = True
                self._held = self._held[closing.end() :]
                self._given.clear()
                given.clear()
                self._at_start = self._is_answer = True
                return True
            searched = closing.end()
        tags = (*_LONE_CLOSINGS, *(_ANSWER_ENDS if self._is_answer else ()))
        kept = 0 if is_last else _length_of_beginning(self._held, tags)
        if not is_last and closing is not None:
            kept = len(self._held) - closing.start()
        cut = len(self._held) - kept
        given.append(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _closes(self, before: str, after: str) -> bool:
        """Whether a closing tag between these ends reasoning, and is not a mention of the tag."""
        if self._is_answer or _OPENING.search(before):
            return False
        if (before[-1:] in _QUOTES and before) or (after[:1] in _QUOTES and after):
            return False
        line = before.rpartition("\n")[2]
        starts_line, ends_line = not line.strip(), not after.partition("\n")[0].strip()
        return starts_line or ends_line or line.rstrip()[-1] in ".!?。！？:"


def _has_tag_start(text: str) -> bool:
    return "<" in text or "[" in text or "◁" in text


def _may_become(text: str, tag: str) -> bool:
    """Whether ``text`` is a beginning of ``tag``, the empty one included."""
    return len(text) <= len(tag) and tag[: len(text)].lower() == text.lower()


def _length_of_beginning(text: str, tags: tuple[str, ...]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``tags``."""
    longest = 0
    if not _has_tag_start(text[-_LONGEST_TAG:]):
        return 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text[-length:].lower() == tag[:length].lower():
                longest = length
                break
    return longest
