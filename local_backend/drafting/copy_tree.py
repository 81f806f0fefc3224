"""How far to copy, and which of several continuations: a token tree grown where acceptance is likeliest.

Every source is a position whose token may come next, and votes for that token with its weight. Together with
the weight of "none of them", the votes give a probability for each next token: sources that agree add up,
sources that disagree share. The tree always adds the token, anywhere in it, that is likeliest to be accepted,
until no token reaches the minimum probability. So a single certain match gives a chain, and ten short matches
that disagree give a wide tree.

``benchmarks.copy_fit`` fits the weights to known answers by maximum likelihood.

Pure: positions and tokens in, a draft out. Knows no rows and no model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from local_backend.drafting.draft import Draft
from local_backend.drafting.suffix_index import BORDER

# Class of each match length: 0, 1, 2, 3, 4, 5 to 6, 7 to 10, 11 and more tokens.
_LENGTH_CLASSES = (0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7)
_NUM_CLASSES = _LENGTH_CLASSES[-1] + 1
_NUM_TRAITS = 12  # of copy_sources


def length_class(num_tokens: int) -> int:
    """The class of a match of ``num_tokens`` tokens: 0 to 7."""
    return _LENGTH_CLASSES[num_tokens] if num_tokens < len(_LENGTH_CLASSES) else 7


@dataclass(frozen=True, slots=True)
class CopyWeights:
    """Log weights of the sources' votes.

    Attributes:
        traits: One for each trait of a source; see :mod:`~local_backend.drafting.copy_sources`.
        by_length: One for each class of match length, which includes the tokens added by the path.
        miss: Of "none of them": a constant, one for the log number of matching sources, one for the
            deviation (see :func:`grow`), and one for each class of the longest match.
        sharpness: Exponent of a token's summed votes.

    Raises:
        ValueError: There are too many or too few weights.
    """

    traits: tuple[float, ...]
    by_length: tuple[float, ...]
    miss: tuple[float, ...]
    sharpness: float

    def __post_init__(self) -> None:
        sizes = len(self.traits), len(self.by_length), len(self.miss)
        if sizes != (wanted := (_NUM_TRAITS, _NUM_CLASSES, 3 + _NUM_CLASSES)):
            raise ValueError(f"weights of reference copy are {wanted} numbers, got {sizes}")


@dataclass(frozen=True, slots=True)
class Source:
    """A position in a text whose tokens may come next in a row.

    Attributes:
        index: Index of the first token to copy.
        num_tokens: How many tokens before it match; 0 if the position is a guess.
        traits: Features that weight its vote.
    """

    tokens: Sequence[int]
    index: int
    num_tokens: int
    traits: tuple[float, ...]


# A source as the inner loop needs it: tokens, index, matching tokens, weight.
Voter = tuple[Sequence[int], int, int, float]


class Votes:
    """Counts the votes of sources, under weights that stay.

    ``deviation`` is the log odds that the next token differs from the position the row copies from.
    ``caution`` is added to the log weight of "none of them" after the first token: how much more often than
    expected the row's copies break off.
    """

    def __init__(self, weights: CopyWeights, *, deviation: float, caution: float = 0.0) -> None:
        miss_at, miss_per_log, miss_per_deviation, *miss_by_longest = weights.miss
        self._by_length = [math.exp(each) for each in weights.by_length]
        self._traits, self._sharpness = weights.traits, weights.sharpness
        self._miss_at, self._caution = miss_at + miss_per_deviation * deviation, caution
        self._miss_per_log, self._miss_by_longest = miss_per_log, miss_by_longest

    def weigh(self, sources: Sequence[Source]) -> list[Voter]:
        """The sources with their weights."""
        traits = self._traits
        return [
            (one.tokens, one.index, one.num_tokens, math.exp(sum(map(mul, traits, one.traits))))
            for one in sources
        ]

    def count(self, voters: Sequence[Voter], depth: int) -> tuple[dict[int, float], dict[int, list[Voter]]]:
        """The probability of each token ``depth`` tokens behind the positions of voters, and its voters."""
        by_length = self._by_length
        last_class = len(by_length) - 1
        votes: dict[int, float] = {}
        groups: dict[int, list[Voter]] = {}
        num_matching = longest = 0
        for voter in voters:
            tokens, index, num_tokens, weight = voter
            if index + depth >= len(tokens):  # beyond the end of the emitted text: assume it repeats
                index += depth % (len(tokens) - index)
            else:
                index += depth
            if (token := tokens[index]) == BORDER:
                continue
            total = num_tokens + depth
            vote = weight * by_length[_LENGTH_CLASSES[total] if total < 12 else last_class]
            if num_tokens:
                num_matching += 1
            longest = max(longest, total)
            if token in votes:
                votes[token] += vote
                groups[token].append(voter)
            else:
                votes[token] = vote
                groups[token] = [voter]
        if not votes:
            return votes, groups
        miss = (
            self._miss_at
            + (self._caution if depth else 0.0)
            + self._miss_per_log * math.log(num_matching or 0.5)
            + self._miss_by_longest[length_class(longest)]
        )
        sharp = {token: vote**self._sharpness for token, vote in votes.items()}
        total_weight = sum(sharp.values()) + math.exp(miss)
        return {token: vote / total_weight for token, vote in sharp.items()}, groups


def grow(
    sources: Sequence[Source], votes: Votes, *, max_tokens: int, max_depth: int, min_probability: float
) -> Draft:
    """Grow the tree of likeliest continuations, likeliest first.

    A token is added if its whole path is accepted with at least ``min_probability``.
    """
    if max_depth < 1 or max_tokens < 1 or not sources:
        return Draft()
    token_ids: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    # Candidates: negative path probability, arrival, parent, depth, token, its voters.
    frontier: list[tuple[float, int, int, int, int, list[Voter]]] = []
    num_offered = 0

    def offer(probability: float, parent: int, depth: int, behind: list[Voter]) -> None:
        nonlocal num_offered
        shares, groups = votes.count(behind, depth)
        for token, share in shares.items():
            if probability * share >= min_probability:
                num_offered += 1
                heapq.heappush(
                    frontier, (-probability * share, num_offered, parent, depth + 1, token, groups[token])
                )

    offer(1.0, -1, 0, votes.weigh(sources))
    while frontier and len(token_ids) < max_tokens:
        negative, _, parent, depth, token, group = heapq.heappop(frontier)
        token_ids.append(token)
        parents.append(parent)
        probabilities.append(-negative)
        if depth < max_depth:
            offer(-negative, len(token_ids) - 1, depth, group)
    return Draft(tuple(token_ids), tuple(parents), tuple(probabilities))
