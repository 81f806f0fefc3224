"""Which spans to copy, and how far: a token tree grown where acceptance is likeliest.

Every earlier place at which the row's last tokens occurred says what followed there. Long matches are trusted
more than short ones, and places that agree add up; what they say together is a probability for each
next token. The tree takes up whichever token, anywhere in it, is likeliest to be accepted, until it is full
or nothing promises enough. So where a single long match is certain the tree is a chain, and where ten short
matches disagree it is a bush.

Pure: places and tokens in, a draft out. Knows no rows and no model.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from local_backend.draft import Draft

# Odds that no known continuation is right, behind a match of so many tokens (0: no match, a guess at a
# beginning); longer matches take the last. Measured on answers to retrieved documents, where they fall from
# a half to a tenth; see `python -m benchmarks.copy_steps`.
_MISS_BY_MATCH_TOKENS = (0.3, 0.5, 0.35, 0.25, 0.2, 0.2, 0.1)
# The weight of a match grows with its length, to this power, up to this length.
_LENGTH_POWER, _LONGEST_COUNTED_TOKENS = 1.3, 24
# Above 1: the likelier of two continuations gains from being the likelier.
_SHARPNESS = 1.25


@dataclass(frozen=True, slots=True)
class Source:
    """An earlier place that may be followed by what comes next.

    Attributes:
        next_place: Where its continuation begins.
        num_tokens: How many tokens match; 0 where the place is a guess.
        trust: Weight of its text among the others.
    """

    next_place: int
    num_tokens: int
    trust: float = 1.0

    @property
    def weight(self) -> float:
        """How much its continuation counts."""
        length = min(max(self.num_tokens, 0.5), _LONGEST_COUNTED_TOKENS)
        return self.trust * math.pow(length, _LENGTH_POWER)

    def after_next(self) -> Source:
        """The same source once its next token has been taken up."""
        return Source(self.next_place + 1, self.num_tokens + 1, self.trust)


def grow(
    sources: Sequence[Source],
    token_at: Callable[[int], int | None],
    *,
    max_tokens: int,
    max_depth: int,
    min_probability: float,
) -> Draft:
    """The tree of likeliest continuations.

    Args:
        sources: Where the row's last tokens occurred before.
        token_at: The token at a place, ``None`` where the text there ends.
        max_tokens: Size of the tree, at most.
        max_depth: Length of a path, at most.
        min_probability: A token is taken up if its whole path is accepted with at least this probability.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    # Candidates, likeliest first: minus the path's probability, arrival, parent, depth, token, sources.
    frontier: list[tuple[float, int, int, int, int, list[Source]]] = []
    num_seen = 0

    def offer(probability: float, parent: int, depth: int, behind: Sequence[Source]) -> None:
        nonlocal num_seen
        by_token: defaultdict[int, list[Source]] = defaultdict(list)
        for source in behind:
            if (token := token_at(source.next_place)) is not None:
                by_token[token].append(source)
        if not by_token or depth > max_depth:
            return
        weights = {token: sum(source.weight for source in group) for token, group in by_token.items()}
        total = sum(weights.values())
        longest = max(source.num_tokens for group in by_token.values() for source in group)
        hit = probability * (1 - _MISS_BY_MATCH_TOKENS[min(longest, len(_MISS_BY_MATCH_TOKENS) - 1)])
        for token, weight in weights.items():
            path_probability = hit * (weight / total) ** _SHARPNESS
            if path_probability >= min_probability:
                num_seen += 1
                entry = (-path_probability, num_seen, parent, depth, token, by_token[token])
                heapq.heappush(frontier, entry)

    offer(1.0, -1, 1, sources)
    while frontier and len(token_ids) < max_tokens:
        negative, _, parent, depth, token, group = heapq.heappop(frontier)
        token_ids.append(token)
        parents.append(parent)
        offer(-negative, len(token_ids) - 1, depth + 1, [source.after_next() for source in group])
    return Draft(tuple(token_ids), tuple(parents))
