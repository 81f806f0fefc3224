"""What a row has written itself, with every earlier place at which its last tokens occur.

The length of the match that ends at a place is one more than that of the match that ended before it, one
token ago. So a new token costs one look at each of its earlier occurrences, of which the latest few are
kept, and however long the matches are, nothing is compared twice.

Knows token ids only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from local_backend.drafters.text_index import Match

_KEPT_PLACES = 32  # of each token


class WrittenText:
    """A growing text."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_KEPT_PLACES))
        self._lengths: dict[int, int] = {}  # of the match that ends at a place

    def extend(self, token_ids: Sequence[int]) -> None:
        """The row has written these."""
        for token in token_ids:
            before = self._lengths
            self._lengths = {place: before.get(place - 1, 0) + 1 for place in self._places.get(token, ())}
            self._places[token].append(len(self.tokens))
            self.tokens.append(token)

    def matches(self, *, limit: int) -> list[Match]:
        """Earlier places at which the end of the text occurs, the longest matches first, then the latest."""
        found = [Match(place + 1, num_tokens) for place, num_tokens in self._lengths.items()]
        found.sort(key=lambda match: (-match.num_tokens, -match.place))
        return found[:limit]
