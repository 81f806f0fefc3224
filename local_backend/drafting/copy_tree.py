"""How far to copy, and which of several continuations: a token tree grown where acceptance is likeliest.

Every source, a place that may be followed by what comes next, votes for the token behind it with its
weight. With the weight of "none of them" the votes make a probability for each next token; where
sources agree they add up, where they disagree they share. The tree takes up whichever token, anywhere in it,
is likeliest to be accepted, until the likeliest left is not worth its price. So where a single long match is
certain the tree is a chain, and where ten short matches disagree it is a bush.

The weights were fitted to known answers by maximum likelihood; ``python -m benchmarks.copy_weights`` does it.

Pure: places and tokens in, a draft out. Knows no rows and no model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from local_backend.drafting.draft import Draft
from local_backend.drafting.suffix_index import BORDER

# First lengths of the classes of match length: 0, 1, 2, 3, 4, 5 to 6, 7 to 10, 11 and more tokens.
_LENGTH_CLASSES = (0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7)


def length_class(num_tokens: int) -> int:
    """The class of a match of so many tokens: 0 to 7."""
    return _LENGTH_CLASSES[num_tokens] if num_tokens < len(_LENGTH_CLASSES) else 7


@dataclass(frozen=True, slots=True)
class CopyWeights:
    """What a source's vote counts, as logarithms.

    Attributes:
        traits: For each trait of a source; see :mod:`~local_backend.drafting.copy_sources`.
        by_length: For each class of match length, the tokens that the path has added included.
        miss: Of "none of them": a constant, then for the logarithm of the number of sources, for how
            seldom the text goes on as the place it was copied from, and for the classes of the longest match.
        sharpness: The power to which votes are taken.
    """

    traits: tuple[float, ...]
    by_length: tuple[float, ...]
    miss: tuple[float, ...]
    sharpness: float


@dataclass(frozen=True, slots=True)
class Source:
    """A place that may be followed by what comes next.

    Attributes:
        tokens: The text it lies in.
        place: Of its first token that may be copied.
        num_tokens: How many tokens before it match; 0 where the place is a guess.
        traits: Numbers that say how good it is.
    """

    tokens: Sequence[int]
    place: int
    num_tokens: int
    traits: tuple[float, ...]


# A source as the inner loop wants it: tokens, place, tokens that match, weight.
_Voter = tuple[Sequence[int], int, int, float]


def grow(
    sources: Sequence[Source],
    weights: CopyWeights,
    *,
    deviation: float,
    caution: float = 0.0,
    max_tokens: int,
    max_depth: int,
    min_probability: float,
) -> Draft:
    """The tree of likeliest continuations, likeliest first.

    Args:
        sources: Where the text may go on.
        weights: What they count.
        deviation: How seldom the text goes on as the place it was copied from, as log odds.
        caution: Added to the log weight of "none of them" behind the first token: how much oftener than
            usual copies of this row break off.
        max_tokens: Size of the tree, at most.
        max_depth: Length of a path, at most.
        min_probability: A token is taken up if its whole path is accepted with at least this probability.
    """
    if max_depth < 1 or max_tokens < 1 or not sources:
        return Draft()
    by_length, sharpness = [math.exp(each) for each in weights.by_length], weights.sharpness
    miss_at, miss_per_log, miss_per_deviation, *miss_by_longest = weights.miss
    miss_at += miss_per_deviation * deviation
    voters: list[_Voter] = [
        (
            source.tokens,
            source.place,
            source.num_tokens,
            math.exp(sum(map(mul, weights.traits, source.traits))),
        )
        for source in sources
    ]
    last_class = len(by_length) - 1
    token_ids: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    # Candidates: minus the path's probability, arrival, parent, depth, token, those who voted for it.
    frontier: list[tuple[float, int, int, int, int, list[_Voter]]] = []
    num_offered = 0

    def offer(probability: float, parent: int, depth: int, behind: list[_Voter]) -> None:
        nonlocal num_offered
        votes: dict[int, float] = {}
        groups: dict[int, list[_Voter]] = {}
        num_matching = longest = 0
        for voter in behind:
            tokens, place, num_tokens, weight = voter
            if place + depth >= len(tokens):  # a text that is being written; it may repeat itself
                place += depth % (len(tokens) - place)
            else:
                place += depth
            if (token := tokens[place]) == BORDER:
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
            return
        miss = (
            miss_at
            + (caution if depth else 0.0)
            + miss_per_log * math.log(num_matching or 0.5)
            + miss_by_longest[length_class(longest)]
        )
        sharp = {token: vote**sharpness for token, vote in votes.items()}
        share = probability / (sum(sharp.values()) + math.exp(miss))
        for token, vote in sharp.items():
            if vote * share >= min_probability:
                num_offered += 1
                heapq.heappush(
                    frontier, (-vote * share, num_offered, parent, depth + 1, token, groups[token])
                )

    offer(1.0, -1, 0, voters)
    while frontier and len(token_ids) < max_tokens:
        negative, _, parent, depth, token, group = heapq.heappop(frontier)
        token_ids.append(token)
        parents.append(parent)
        probabilities.append(-negative)
        if depth < max_depth:
            offer(-negative, len(token_ids) - 1, depth, group)
    return Draft(tuple(token_ids), tuple(parents), tuple(probabilities))
