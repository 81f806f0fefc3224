"""The text of one reply, without reasoning and without what a reader already has. Pure."""

from __future__ import annotations

from sot_chains.filters.reasoning import ReasoningFilter
from sot_chains.providers.base import ProviderError


class ReplyReader:
    """Reads the text of one attempt: without reasoning, and without the beginning that was read already.

    Args:
        beginning: The text that the reply is expected to begin with, and that is not given out again.
        is_open: Whether the reply is expected to begin inside a block of reasoning.

    Attributes:
        has_text: Whether the answer has any text so far.
        reasoning: Takes the reasoning out of the text, and knows what it was.
    """

    def __init__(self, beginning: str, *, is_open: bool) -> None:
        self.has_text = False
        self.reasoning = ReasoningFilter(is_open=is_open)
        self._rest = beginning

    def feed(self, piece: str) -> str:
        """The new text that the next raw piece gives.

        Raises:
            ProviderError: The reply does not begin as expected.
        """
        text = self.reasoning.feed(piece)
        if self._rest and text:
            text = self._without_beginning(text)
        self.has_text = self.has_text or bool(text.strip())
        return text

    def end(self) -> str:
        """The rest, after the last piece.

        Raises:
            ProviderError: The reply ended before the end of what was read already.
        """
        text = self.reasoning.end()
        if self._rest and text:
            text = self._without_beginning(text)
        self.has_text = self.has_text or bool(text.strip())
        if self._rest.strip():
            raise _other_reply()
        return text

    def _without_beginning(self, text: str) -> str:
        rest = self._rest
        if not rest.strip() and text[:1].strip():  # blanks where it goes on may be left out
            self._rest = ""
            return text
        num_same = min(len(rest), len(text))
        if text[:num_same] != rest[:num_same]:
            raise _other_reply()
        self._rest = rest[num_same:]
        return text[num_same:]


def _other_reply() -> ProviderError:
    return ProviderError(
        "the call broke off and said something else when it was made again; "
        "the beginning has been read already and cannot be taken back"
    )
