"""Token ids to text, bit by bit: never half a character, never part of a stop string.

Knows the tokenizer's ``decode`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How many tokens of context a tokenizer needs so that the text of the next ones no longer changes
# (SentencePiece drops the space before the first word it decodes).
_CONTEXT_TOKENS = 6
_HALF_CHARACTER = "\ufffd"


class Detokenizer:
    """The text of one row, as it grows.

    Args:
        tokenizer: Decodes ids.
        stop: Strings before which the text ends.
        context_token_ids: Tokens the row continues in mid-text, e.g. the given start of a reply; the text
            begins after them, with the space that belongs there.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        context_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = list(context_token_ids[-_CONTEXT_TOKENS:])
        self._window_text = self._decode(self._window)
        self._held = ""
        self.stopped = False

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    @property
    def has_stop(self) -> bool:
        """Whether there are strings before which the text ends."""
        return bool(self._stop)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is now certain."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if text.endswith(_HALF_CHARACTER):
            return ""
        fresh = text[len(self._window_text) :]
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._window_text = self._decode(self._window)
        return self._up_to_stop(fresh)

    def finish(self) -> str:
        """The text still held back, once no more tokens come."""
        text = self._decode(self._window)[len(self._window_text) :]
        certain = self._up_to_stop(text)
        held, self._held = self._held, ""
        return certain if self.stopped else certain + held

    def _up_to_stop(self, fresh: str) -> str:
        """Cut at the first stop string; hold back what could be the beginning of one."""
        if self.stopped:
            return ""
        text = self._held + fresh
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        certain, self._held = text[: len(text) - held], text[len(text) - held :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
