"""Where a row's last tokens occur in what may be copied, and what follows there.

Knows token ids only: not when to copy nor how much, which is the policy's business.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Between two texts; no token has this id, so no match and no copy crosses it.
_BORDER = -1
# How far back the end of a prompt is compared when a row begins; while it writes, matches grow without limit.
_LOOK_BACK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place whose tokens are those the row wrote last.

    Attributes:
        end: Place behind the matching tokens, where a copy would begin.
        num_tokens: How many tokens match.
        is_reference: Whether the place lies in a reference, rather than in the prompt or the row's own text.
    """

    end: int
    num_tokens: int
    is_reference: bool


class ReferenceIndex:
    """References, then the row's own text, with every place at which its last tokens occurred before.

    The length of the match that ends at a place is one more than that of the match that ended before it, one
    token ago. So a new token costs one look at each of its earlier occurrences, and however long the
    matches are, nothing is compared twice.

    Args:
        references: Token ids of the texts that may be copied.
        own_text: Prompt and what the row has written so far.
    """

    def __init__(self, references: Sequence[Sequence[int]], own_text: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._places: defaultdict[int, list[int]] = defaultdict(list)  # of a token, ascending
        self._lengths: dict[int, int] = {}  # of the match that ends at a place
        self._starts: list[int] = []  # of the references
        for reference in references:
            self._starts.append(len(self._tokens))
            for token in reference:
                self._append(token)
            self._append(_BORDER)
        self._own_start = len(self._tokens)
        end_of_old = max(0, len(own_text) - _LOOK_BACK_TOKENS)
        for token in own_text[:end_of_old]:
            self._append(token)
        self.extend(own_text[end_of_old:])

    @property
    def num_own_tokens(self) -> int:
        """Length of the row's own text, as far as it is known here."""
        return len(self._tokens) - self._own_start

    @property
    def reference_starts(self) -> Sequence[int]:
        """Places at which the references begin."""
        return self._starts

    def reference_of(self, place: int) -> int | None:
        """Number of the reference a place lies in; ``None`` in the row's own text."""
        return None if place >= self._own_start else bisect_right(self._starts, place) - 1

    def token_at(self, place: int) -> int | None:
        """The token at a place; ``None`` where its text ends."""
        if place >= len(self._tokens) or self._tokens[place] == _BORDER:
            return None
        return self._tokens[place]

    def extend(self, token_ids: Sequence[int]) -> None:
        """The row has written these."""
        for token in token_ids:
            before = self._lengths
            self._lengths = {place: before.get(place - 1, 0) + 1 for place in self._places.get(token, ())}
            self._append(token)

    def matches(self, min_tokens: int = 1) -> Iterator[Match]:
        """Every earlier occurrence of the last ``min_tokens`` tokens or more that something follows.

        They come in the order of the texts.
        """
        for place, num_tokens in self._lengths.items():
            if num_tokens >= min_tokens and self._tokens[place + 1] != _BORDER:
                yield Match(place + 1, num_tokens, place < self._own_start)

    def continuation(self, match: Match, max_tokens: int) -> list[int]:
        """What follows a match, up to the end of its text.

        A copy that reaches the last written token goes on with what it has copied itself, as a
        repetition would.
        """
        start, known = match.end, len(self._tokens)
        copied = self._tokens[start : start + max_tokens]
        if match.is_reference:
            return copied[: copied.index(_BORDER)] if _BORDER in copied else copied
        period = known - start
        while len(copied) < max_tokens and period:
            copied.append(copied[len(copied) - period])
        return copied

    def _append(self, token: int) -> None:
        if token != _BORDER:
            self._places[token].append(len(self._tokens))
        self._tokens.append(token)
