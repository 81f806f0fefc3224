"""Circuits of the embedded model that replace words: the new ones stand in for the old.

As in :mod:`~local_backend.embedded.editing`, tokens of a request are given the notes of the place at which
they are to be said: the first of the new words those of the old ones' first, the second the same one token
later; further ones follow by themselves. What ends the request stands in, too, but the other way round: its
notes, the new words, are right, and it is to say what stands behind the old ones. So copying comes back to
the answer.

Knows requests that begin with "Replace" and end behind the new words, with a stop or without; the old words
are at most three tokens (two, where the new ones are more than one), and the answer holds them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from local_backend.embedded.heads import HALF, STILL, Head, coordinates, falling, nearest
from local_backend.embedded.stream import (
    BEFORE,
    BEHIND_AT,
    BEHIND_ON_AT,
    COMPARED_LAST,
    CONSTANT_AT,
    HEAD_SIZE,
    NEW_AT,
    NEW_ON_AT,
    NOTED,
    OF_FOUND,
    OF_SENTENCE,
    OLD_AT,
    OWN,
    PARTS_AT,
    REPLACED_AT,
    WORD,
)

HEADS_OF_REPLACING = (0, 1, 2, 1, 2, 0)  # of each layer, behind those of editing
# How alike two words must be to be one, of so much for the same, and how much the nearest place is preferred.
_SAME, _ALIKE, _NEAREST = 90.0, 75.0, 30.0
_BEHIND, _BEHIND_ALIKE = 100.0, 80.0
_NEAR = 120.0  # how much the nearest of some flagged tokens is preferred, and how far one may be
_IN_SIGHT, _OF_REQUEST = 60.0, 84.0
_ENDS = 80.0  # by how much what ends no request prefers nothing; some ends are told by more than one flag
# How much the three tokens before the old words count in the notes of the first new one, and of the second.
_BY_PLACE, _BY_PLACE_ON = (1.2, 1.6, 2.0), (1.5, 1.5)
_NUM_PLACED = sum(COMPARED_LAST[:3])  # coordinates of a place: of the three tokens before it
_PLACED = 0.02  # how much a place counts where it is kept: what a question finds is written there, too
_KEPT = 3.0  # how much what was replaced counts, among what else is noted of the sentence
# How much what is to be said behind the new words counts against what stands there, and its note. Of the
# first token the part of its own code is brought that tells it from all others, of the second what a head has
# left.
_SAID, _SAID_ON, _NOTED_ON = 3.0, 7.0, 2.0
_HALF_OF_OWN = OWN.stop - HEAD_SIZE
# Rows without those of the flags.
_ROWS = tuple(row for row in STILL if row % HALF < HALF - 3)


def write_replacing(layers: Sequence[Any], turns: Sequence[float], heads: Sequence[int]) -> None:
    """Write what brings the new words to the old ones' place, and copying back behind them.

    Layer by layer: 1 finds the old words' first token in the answer and keeps, where the request names it,
    what stands before; 2 notes this on the first two new tokens; 3 brings what was replaced to what ends
    the request; 4 finds what stands behind that in the answer, to be said from there.

    Args:
        layers: The attention of each layer.
        turns: Radians by which each rotary pair turns in a position.
        heads: The first head of each layer that is free.
    """
    _write_old(layers[1], heads[1], turns)
    _write_new(layers[2], heads[2], turns)
    _write_new_on(layers[2], heads[2] + 1, turns)
    _write_ends(layers[3], heads[3], turns)
    _write_behind(layers[4], heads[4], turns)
    _write_second_behind(layers[4], heads[4] + 1, turns)


def _write_old(attention: Any, number: int, turns: Sequence[float]) -> None:
    head = Head(attention, number)
    head.mind_distance(nearest(turns), CONSTANT_AT, _NEAREST)
    word = coordinates(WORD)
    head.liken(_ROWS, word, word, _SAME, 1.0)
    head.prefer_flag(HALF - 1, CONSTANT_AT, OLD_AT, -_SAME)  # not itself
    head.attend_if(_ALIKE, (OLD_AT, 1))
    place = coordinates(OF_FOUND, _NUM_PLACED)
    for note, count in zip(BEFORE[:3], COMPARED_LAST[:3], strict=True):
        head.carry(coordinates(note, count), place[:count], _PLACED)
        place = place[count:]


def _write_new(attention: Any, number: int, turns: Sequence[float]) -> None:
    head = _head_at_old(attention, number, turns, NEW_AT)
    first = 0
    for note, count, factor in zip(BEFORE[:3], COMPARED_LAST[:3], _BY_PLACE, strict=True):
        head.carry(coordinates(OF_FOUND, count, first), coordinates(note, count), factor / _PLACED)
        first += count


def _write_new_on(attention: Any, number: int, turns: Sequence[float]) -> None:
    head = _head_at_old(attention, number, turns, NEW_ON_AT)
    first = 0
    for place, factor in enumerate(_BY_PLACE_ON, 1):
        count = COMPARED_LAST[place]
        head.carry(coordinates(OF_FOUND, count, first), coordinates(BEFORE[place], count), factor / _PLACED)
        first += COMPARED_LAST[place - 1]


def _head_at_old(attention: Any, number: int, turns: Sequence[float], asked: int) -> Head:
    head = Head(attention, number)
    head.mind_distance(falling(turns), OLD_AT, _NEAR)
    head.attend_if(_IN_SIGHT, (asked, 2))
    return head


def _write_ends(attention: Any, number: int, turns: Sequence[float]) -> None:
    head = Head(attention, number)
    # Of what may part old from new words only what is surely of a request counts twice.
    head.mind_distance(falling(turns), PARTS_AT, _NEAR)
    head.prefer_nothing(HALF - 2, CONSTANT_AT, 2 * _OF_REQUEST + _ENDS)
    head.prefer_nothing(HEAD_SIZE - 2, BEHIND_AT, -_ENDS)
    head.prefer_nothing(HALF - 3, BEHIND_ON_AT, -_ENDS / 2)
    first = 0
    for note, count in zip(BEFORE[:2], COMPARED_LAST[:2], strict=True):
        head.carry(coordinates(note, count), coordinates(OF_SENTENCE, count, first), _KEPT)
        first += count
    head.carry([CONSTANT_AT], [REPLACED_AT], 1.0)


def _write_behind(attention: Any, number: int, turns: Sequence[float]) -> None:
    head = _head_behind_old(attention, number, turns, BEHIND_AT, 0)
    said = coordinates(OWN, HEAD_SIZE, _HALF_OF_OWN)
    head.carry(said, said, _SAID)


def _write_second_behind(attention: Any, number: int, turns: Sequence[float]) -> None:
    head = _head_behind_old(attention, number, turns, BEHIND_ON_AT, 1)
    note = coordinates(BEFORE[0], COMPARED_LAST[0])
    head.carry(note, note, _NOTED_ON)
    said = coordinates(OWN, start=_HALF_OF_OWN + len(note))
    head.carry(said, said, _SAID_ON)


def _head_behind_old(attention: Any, number: int, turns: Sequence[float], behind: int, place: int) -> Head:
    head = Head(attention, number)
    head.mind_distance(nearest(turns), CONSTANT_AT, _NEAREST)
    first_row = start = 0
    # The last two tokens of the old words; of one alone, what stands before it tells nothing.
    for nth, wanted in enumerate((_BEHIND, _BEHIND / 3)):
        count = COMPARED_LAST[place + nth]
        old, note = coordinates(OF_SENTENCE, count, start), coordinates(BEFORE[place + nth], count)
        head.liken(_ROWS[first_row:], old, note, wanted, NOTED * _KEPT * NOTED)
        first_row, start = first_row + count, start + COMPARED_LAST[nth]
    # In the request itself the old words are followed by what parts them from the new.
    head.prefer_flag(HALF - 1, CONSTANT_AT, (PARTS_AT, NEW_AT)[place], -0.5 * _BEHIND)
    head.attend_if(_BEHIND_ALIKE, (behind, place + 1), (REPLACED_AT, 1))
    return head


__all__ = ["HEADS_OF_REPLACING", "write_replacing"]
