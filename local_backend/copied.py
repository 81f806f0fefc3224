"""Which spans of an answer stand word for word in a reference.

Told from the token ids alone, so it does not depend on how drafts fell or which drafter was used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopiedSpan:
    """Tokens that an answer and a reference share.

    Attributes:
        start: Place of the first in the answer.
        num_tokens: How many.
        reference: Number of the reference, in the order given.
        reference_start: Place of the first in it.
    """

    start: int
    num_tokens: int
    reference: int
    reference_start: int


def copied_spans(
    token_ids: Sequence[int], references: Sequence[Sequence[int]], min_tokens: int = 8
) -> tuple[CopiedSpan, ...]:
    """The spans of at least ``min_tokens`` tokens, in order and without overlap.

    From left to right, at each token the longest span that begins there; of equals the first reference's.

    Raises:
        ValueError: ``min_tokens`` is below 1.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens must be at least 1, got {min_tokens}")
    answer = tuple(token_ids)
    wanted = {answer[start : start + min_tokens] for start in range(len(answer) - min_tokens + 1)}
    places: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, reference in enumerate(map(tuple, references)):
        for start in range(len(reference) - min_tokens + 1):
            if (key := reference[start : start + min_tokens]) in wanted:
                places[key].append((number, start))
    spans: list[CopiedSpan] = []
    start = 0
    while start <= len(answer) - min_tokens:
        best: CopiedSpan | None = None
        for number, place in places.get(answer[start : start + min_tokens], ()):
            length = _num_equal(answer, start, references[number], place, min_tokens)
            if best is None or length > best.num_tokens:
                best = CopiedSpan(start, length, number, place)
        if best is None:
            start += 1
        else:
            spans.append(best)
            start += best.num_tokens
    return tuple(spans)


def _num_equal(
    answer: Sequence[int], start: int, reference: Sequence[int], place: int, known_equal: int
) -> int:
    length = known_equal
    limit = min(len(answer) - start, len(reference) - place)
    while length < limit and answer[start + length] == reference[place + length]:
        length += 1
    return length
