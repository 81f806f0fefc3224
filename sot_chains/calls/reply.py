"""The text of one reply, without reasoning and without what a reader already has. Pure."""

from __future__ import annotations

from sot_chains.filters.reasoning import ReasoningFilter
from sot_chains.providers.base import ProviderError


class ReplyReader:
    """Reads the text of one attempt: without reasoning, and without the beginning that was read already.

    Args:
        read: The text that has been read of earlier attempts.
        is_continued: Whether the reply goes on with it, instead of saying it again.
        is_open: Whether the reply is expected to begin inside a block of reasoning.
    """

    def __init__(self, read: str, *, is_continued: bool, is_open: bool) -> None:
        self.text = read  # of all attempts
        self.has_text = False  # of this attempt
        self.reasoning = ReasoningFilter(is_open=is_open)  # takes it out of the text, and knows what it was
        self._rest = read[len(read.rstrip()) :] if is_continued else read  # blanks may come again

    def feed(self, piece: str | None) -> str:
        """The new text that the next raw piece gives; ``None`` ends the reply.

        Raises:
            ProviderError: The reply does not begin as expected, or ends before the end of what was read.
        """
        text = self.reasoning.end() if piece is None else self.reasoning.feed(piece)
        if text and (rest := self._rest):
            is_left_out = not rest.strip() and text[:1].strip()  # blanks where it goes on
            num_same = 0 if is_left_out else min(len(rest), len(text))
            if text[:num_same] != rest[:num_same]:
                raise _other_reply()
            self._rest = "" if is_left_out else rest[num_same:]
            text = text[num_same:]
        if piece is None and self._rest.strip():
            raise _other_reply()
        self.has_text = self.has_text or bool(text.strip())
        self.text += text
        return text


def _other_reply() -> ProviderError:
    return ProviderError(
        "the call broke off and said something else when it was made again; "
        "the beginning has been read already and cannot be taken back"
    )
