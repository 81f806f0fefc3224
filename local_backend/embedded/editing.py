"""Circuits of the embedded model that change an answer: tokens of a request stand in for what is to be said.

Copying goes on as the text went on where the last tokens stood before, and every token holds notes on those
before it (:mod:`~local_backend.embedded.quoting`). Here a token of the request is given the notes of the
place at which it is to be said. There copying goes on with it; before and behind, the answer is copied as it
stands. The first token of a heading to be added is noted as standing behind the number of the next point,
its second and third with the opening of a heading before the first, and the end of a request for a shorter
answer as standing behind the second point.

Knows requests that stand behind the answer and hold one of a few words, and answers of up to nine points (of
eight, where one is added), numbered, with headings. What is said of a new heading is learned. A request
stands in for as long as it is there: the last of a conversation is not told from those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from local_backend.embedded.heads import HALF, Head, coordinates, nearest
from local_backend.embedded.stream import (
    ADDED_AT,
    ADDED_ON_AT,
    ASKING,
    BEFORE,
    COMPARED_LAST,
    CONSTANT_AT,
    MATCHED,
    NOTED,
    OPENING_AT,
    SHORTENED_AT,
    WORD,
)
from local_backend.embedded.tasks import NUM_KEPT

HEADS_OF_EDITING = (0, 2, 1, 0, 0, 0)  # of each layer, behind those of quoting
# What is sought by two codes is attended to; what holds one of them, and any of the other, is not. Of several
# places the nearest is preferred: that of the last answer.
_SOUGHT, _SOUGHT_BY_HALF, _NEAREST = 84.0, 75.0, 14.0
_BY_NUMBER = 2.4  # how much the number counts, in notes; its two neighbours a little less than one
_BY_OPENING = (2.6, 1.8)  # how much the opening counts that stands two and three tokens before
_BY_END = (0.3, 2.1, 2.1)  # most requests end as sentences do: what ends one tells little


@dataclass(frozen=True)
class BetweenPoints:
    """Codes of the words that stand between points.

    Attributes:
        paragraph: Of what points are apart by, ``[coordinates of a word]``.
        digits: Of the ten digits, ``[10, coordinates of a word]``.
    """

    paragraph: Tensor
    digits: Tensor


def write_editing(
    layers: Sequence[Any], turns: Sequence[float], heads: Sequence[int], between: BetweenPoints
) -> None:
    """Write what makes a heading's first three tokens (layer 1) and a request's end (layer 2) stand in.

    Args:
        layers: The attention of each layer.
        turns: Radians by which each rotary pair turns in a position.
        heads: The first head of each layer that is free.
        between: What stands between points.
    """
    _write_added(layers[1], heads[1], turns, between)
    _write_added_on(layers[1], heads[1] + 1, turns)
    _write_shortened(layers[2], heads[2], turns, between)


def _write_added(attention: Any, number: int, turns: Sequence[float], between: BetweenPoints) -> None:
    head = _head_at_last_opening(attention, number, turns, ADDED_AT)
    # The opening of the last heading, what stands before it, and before that the number: it becomes the next.
    counts = COMPARED_LAST[:3]
    sources = [coordinates(part, count) for part, count in zip((WORD, *BEFORE[:2]), counts, strict=True)]
    targets = [coordinates(part, count) for part, count in zip(BEFORE[:3], counts, strict=True)]
    head.carry(sources[0], targets[0], 0.9 * NOTED)
    head.carry(sources[1], targets[1], 0.9)
    digits = between.digits[:, : MATCHED[2]]
    head.carry(sources[2], targets[2], _BY_NUMBER * successor(digits))


def _write_added_on(attention: Any, number: int, turns: Sequence[float]) -> None:
    # Behind the first token two further ones are no match by themselves: the opening is noted farther back.
    head = _head_at_last_opening(attention, number, turns, ADDED_ON_AT)
    for place, factor in enumerate(_BY_OPENING, 1):
        count = COMPARED_LAST[place]
        head.carry(coordinates(WORD, count), coordinates(BEFORE[place], count), factor * NOTED)


def _head_at_last_opening(attention: Any, number: int, turns: Sequence[float], asked: int) -> Head:
    head = Head(attention, number)
    head.mind_distance(nearest(turns), OPENING_AT, 120.0)
    head.attend_if(14.0, (asked, 2))
    return head


def successor(digits: Tensor) -> Tensor:
    """The map that sends the code of each digit but 9 to that of the next, ``[8, 8]``.

    Args:
        digits: ``[10, 8]``. Those of 0 to 7 are orthogonal, those of 8 and 9 the opposites of 0 and 1.
    """
    return digits[1:9].T @ digits[:8] / digits[0].square().sum()


def _write_shortened(attention: Any, number: int, turns: Sequence[float], between: BetweenPoints) -> None:
    head = Head(attention, number)
    head.mind_distance(nearest(turns), CONSTANT_AT, _NEAREST)
    row = HALF - 1
    third = between.digits[NUM_KEPT + 1][: MATCHED[2]]
    before = between.paragraph[: COMPARED_LAST[1]]
    head.seek(row, CONSTANT_AT, coordinates(WORD, len(third)), third, _SOUGHT / 2)
    head.seek(row, CONSTANT_AT, coordinates(BEFORE[0], len(before)), before * NOTED, _SOUGHT / 2)
    head.attend_if(_SOUGHT_BY_HALF, (SHORTENED_AT, 1 + ASKING))
    for place, factor in enumerate(_BY_END):
        source, target = BEFORE[place + 1], BEFORE[place]
        count = min(source.stop - source.start, COMPARED_LAST[place])
        head.carry(coordinates(source, count), coordinates(target, count), factor)


__all__ = ["HEADS_OF_EDITING", "BetweenPoints", "successor", "write_editing"]
