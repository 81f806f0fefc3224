"""Decodes the text of one row while it is written, and ends it before a stop string.

The pieces add up to what the tokenizer decodes from all tokens at once. Two kinds of tokens cannot be decoded
one by one: parts of a character, and the byte tokens ``<0x00>`` to ``<0xFF>`` of a vocabulary with byte
fallback, of which a whole run is text or none is. (``tokenizers.decoders.DecodeStream`` raises for a third of
random token sequences of such a vocabulary, and cannot be flushed.)

Knows tokenizers. Does not know rows or the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from local_backend.sequences.tokenizing import cached_by_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How many tokens of context a tokenizer needs so that the text of the next ones no longer changes
# (SentencePiece drops the space before the first word it decodes).
_CONTEXT_TOKENS = 6
_HALF_CHARACTER = "\ufffd"
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

Pieces = list[tuple[str, bool]]
"""Pieces of a text in which stop strings are looked for, and whether each is part of the text returned."""


class Detokenizer:
    """Decodes the text of one row incrementally.

    Args:
        tokenizer: Decodes ids.
        stop: Strings before which the text ends. They are looked for in the text with its special tokens, as
            ``generate(stop_strings=...)`` does; the text that is returned has none by default.
        context_token_ids: Tokens the row continues in mid-text, e.g. a prefilled start of a reply; the text
            begins after them, including the space between.
        keep_special_tokens: Return a text with its special tokens.

    Attributes:
        stops: The stop strings, and whether the text has reached one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        context_token_ids: Sequence[int] = (),
        *,
        keep_special_tokens: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._keeps_special = keep_special_tokens
        self._special, self._bytes = (
            # Without them it stands in for a tokenizer and has no text.
            _read_vocabulary(tokenizer) if hasattr(tokenizer, "added_tokens_decoder") else ({}, ())
        )
        self.stops = StopStrings(stop)
        context = [token for token in context_token_ids if token not in self._special]
        # Bytes of the answer are not decoded together with bytes of the context.
        self._window = context[: self._start_of_run(context)] or context
        self._num_read = 0  # characters of the window's text that were passed on
        self._specials: list[tuple[int, str]] = []  # and how much of the window's text is before each
        self._drop_read()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the new text that can no longer change."""
        text, begin = "", 0
        for index, token in enumerate(token_ids):
            if token in self._special:
                text += self._read(token_ids[begin:index])
                self._specials.append((len(_certain(self._decode(self._window))), self._special[token]))
                begin = index + 1
        return text + self._read(token_ids[begin:])

    def finish(self) -> str:
        """Return the text still held back, after the last token."""
        return self.stops.push(self._unread(self._decode(self._window))) + self.stops.finish()

    def _read(self, token_ids: Sequence[int]) -> str:
        """Add tokens that are not special."""
        self._window += token_ids
        whole = text = self._decode(self._window)
        run = self._start_of_run(self._window)
        # If a stop string ends the text here, the run of bytes ends here, too.
        if run < len(self._window) and not self.stops.would_reach(self._unread(_certain(text))):
            text = self._decode(self._window[:run])
        text = _certain(text)
        certain = self.stops.push(self._unread(text))
        self._specials = [(index, token) for index, token in self._specials if index > len(text)]
        self._num_read = max(self._num_read, len(text))
        if self._num_read == len(whole):
            self._drop_read()
        return certain

    def _unread(self, text: str) -> Pieces:
        """The pieces of the window's text, as far as ``text``, that were not passed on."""
        pieces, start = [], self._num_read
        for index, token in self._specials:
            if index <= len(text):
                pieces += [(text[start:index], True), (token, self._keeps_special)]
                start = max(start, index)
        return [*pieces, (text[start:], True)]

    def _drop_read(self) -> None:
        """Shorten a window whose text is read to the context of the next tokens."""
        start = max(0, len(self._window) - _CONTEXT_TOKENS)
        if start < len(self._window) and self._window[start] in self._bytes:
            start = self._start_of_run(self._window[: start + 1])
        self._window = self._window[start:]
        self._num_read = len(self._decode(self._window))

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _start_of_run(self, token_ids: Sequence[int]) -> int:
        """Where the run of byte tokens begins with which ``token_ids`` end; their number if there is none."""
        start = len(token_ids)
        while start and token_ids[start - 1] in self._bytes:
            start -= 1
        return start


def _certain(text: str) -> str:
    """The part of a text that does not change with further tokens: all but the start of a character."""
    return text.rstrip(_HALF_CHARACTER)


class StopStrings:
    """Cuts a text before the first stop string, and holds back what could be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.is_reached = False
        self._held = ""
        self._is_text: list[bool] = []  # for each held character

    def push(self, pieces: Pieces) -> str:
        """Add to the text; returns the text that is certain."""
        if self.is_reached:
            return ""
        if not self.stop:
            return "".join(piece for piece, is_text in pieces if is_text)
        for piece, is_text in pieces:
            self._held += piece
            self._is_text += [is_text] * len(piece)
        found = [start for stop in self.stop if (start := self._held.find(stop)) >= 0]
        if found:
            self.is_reached = True
            return self._take(min(found))
        return self._take(len(self._held) - max(_overlap(self._held, stop) for stop in self.stop))

    def would_reach(self, pieces: Pieces) -> bool:
        """Whether there is a stop string in the text if it goes on with ``pieces``."""
        text = "".join([self._held, *(piece for piece, _ in pieces)])
        return any(stop in text for stop in self.stop)

    def finish(self) -> str:
        """Return the text still held back."""
        return "" if self.is_reached else self._take(len(self._held))

    def _take(self, count: int) -> str:
        text = "".join(compress(self._held[:count], self._is_text))
        self._held, self._is_text = self._held[count:], self._is_text[count:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


@cached_by_tokenizer
def _read_vocabulary(tokenizer: PreTrainedTokenizerBase) -> tuple[Mapping[int, str], Collection[int]]:
    """The tokens that are not decoded one by one: special tokens by id, and the ids of byte tokens."""
    added = tokenizer.added_tokens_decoder
    # What `decode` leaves out.
    special = [id for id in added if added[id].special] if tokenizer.is_fast else tokenizer.all_special_ids
    vocabulary = tokenizer.get_vocab()
    return (
        dict(zip(special, tokenizer.convert_ids_to_tokens(special), strict=True)),
        frozenset(vocabulary[name] for name in _BYTE_TOKENS if name in vocabulary),
    )
