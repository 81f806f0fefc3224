"""Text that may be copied, as a small handle: what travels through call arguments, caches and traces.

Knows texts, and the tokenizer's ``encode``. Does not know how parts are found and copied.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenizedTexts = tuple[tuple[int, ...], ...]


class References:
    """Texts of which an answer may copy parts, e.g. retrieved documents.

    ``repr``, equality and hash are short and depend on the texts alone, and nothing iterates over it, so it
    can stand in cache keys and traces, where the texts themselves should not.

    Args:
        texts: The texts, in order.

    Raises:
        TypeError: ``texts`` is one string, or holds something else than strings.
    """

    __slots__ = ("_digest", "_texts")

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError(
                f"references are a sequence of texts: give a list of str, got {type(texts).__name__}"
            )
        self._texts = tuple(texts)
        hashed = hashlib.sha256()
        for text in self._texts:
            encoded = text.encode("utf-8", "surrogatepass")
            hashed.update(len(encoded).to_bytes(8, "little"))
            hashed.update(encoded)
        self._digest = hashed.hexdigest()

    @classmethod
    def of(cls, texts: Sequence[str] | References) -> References:
        """``texts`` as a handle; what is one already is returned as it is."""
        return texts if isinstance(texts, References) else cls(texts)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts, in order."""
        return self._texts

    @property
    def digest(self) -> str:
        """SHA-256 of the texts, hexadecimal."""
        return self._digest

    def __len__(self) -> int:
        return len(self._texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, References) and self._digest == other._digest

    def __hash__(self) -> int:
        return int(self._digest[:15], 16)  # the same in every process, unlike the hash of a str

    def __repr__(self) -> str:
        return f"References({len(self)} texts, {self._digest[:16]})"


class ReferenceTokens:
    """The token ids of references, each computed once and kept while they are in use; for any thread.

    Equal references give the same object, so what is built upon it can be found again by identity.

    Args:
        tokenizer: Encodes texts, without special tokens.
        max_tokens: Tokens kept, in all; the references used longest ago are dropped first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int = 500_000) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._kept: OrderedDict[str, TokenizedTexts] = OrderedDict()
        self._num_tokens = 0
        self._lock = threading.Lock()

    def __call__(self, references: Sequence[str] | References | None) -> TokenizedTexts:
        """Token ids of each text.

        Raises:
            TypeError: ``references`` is one string, or holds something else than strings.
        """
        if references is None or not len(references):
            return ()
        handle = References.of(references)
        with self._lock:
            if handle.digest in self._kept:
                self._kept.move_to_end(handle.digest)
                return self._kept[handle.digest]
        tokens = tuple(tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in handle.texts)
        with self._lock:
            if handle.digest in self._kept:  # another thread was faster
                return self._kept[handle.digest]
            self._kept[handle.digest] = tokens
            self._num_tokens += sum(map(len, tokens))
            while self._num_tokens > self._max_tokens and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._num_tokens -= sum(map(len, dropped))
        return tokens
