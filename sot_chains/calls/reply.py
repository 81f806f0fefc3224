"""The text of one reply as events, without reasoning and without what a reader already has. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sot_chains.filters.reasoning import ReasoningFilter
from sot_chains.providers.base import ProviderError


@dataclass(slots=True)
class TextDelta:
    """The next piece of the reply."""

    text: str


@dataclass(slots=True)
class Restarted:
    """The attempt failed and another one follows: discard the text so far."""


Event: TypeAlias = TextDelta | Restarted


class ReplyReader:
    """Reads the text of one attempt: without reasoning, and without the beginning that was read already.

    Args:
        beginning: The text that the reply is expected to begin with, and that is not given out again.
        is_open: Whether the reply is expected to begin inside a block of reasoning.
        is_read: Whether anything that was given out has been read.

    Attributes:
        has_text: Whether the answer has any text so far.
        filter: Takes the reasoning out of the text; knows what it was and whether it began before the reply.
    """

    def __init__(self, beginning: str, *, is_open: bool, is_read: Callable[[], bool]) -> None:
        self.has_text = False
        self._rest = beginning
        self.filter = ReasoningFilter(is_open=is_open)
        self._is_read = is_read

    def feed(self, piece: str) -> Sequence[Event]:
        """The events that the next raw piece gives.

        Raises:
            ProviderError: The reply does not begin as expected.
        """
        return self._events(self.filter.feed(piece))

    def end(self) -> Sequence[Event]:
        """The rest, after the last piece.

        Raises:
            ProviderError: The reply ended before the end of what was read already.
        """
        events = self._events(self.filter.end())
        if self._rest.strip():
            raise self._other_reply()
        return events

    def _events(self, text: str) -> Sequence[Event]:
        events: list[Event] = []
        if self.filter.has_discarded:  # what was given out was reasoning
            self.filter.has_discarded = False
            if not self._is_read():
                self.has_text = False
                events.append(Restarted())
        if text:
            self.has_text = self.has_text or not text.isspace()
            if new := self._without_beginning(text):
                events.append(TextDelta(new))
        return events

    def _without_beginning(self, text: str) -> str:
        """What of the next piece is new.

        Raises:
            ProviderError: The reply begins otherwise.
        """
        rest = self._rest
        if not rest:
            return text
        if not rest.strip() and text[:1].strip():  # blanks at the place to continue from may be left out
            self._rest = ""
            return text
        num_same = min(len(rest), len(text))
        if text[:num_same] != rest[:num_same]:
            raise self._other_reply()
        self._rest = rest[num_same:]
        return text[num_same:]

    @staticmethod
    def _other_reply() -> ProviderError:
        return ProviderError(
            "the call broke off and said something else when it was made again; "
            "the beginning has been read already and cannot be taken back"
        )
