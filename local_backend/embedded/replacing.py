"""Circuits of the embedded model that replace words of an answer by others.

A request names the old words and the new ones. The first two new tokens are given the notes of the place at
which the old words stand in the answer: copying goes on with them there, as with what is to be added (see
:mod:`~local_backend.embedded.editing`). Behind a new word of one token a reply looks as if the old word had
been said, and copying goes on with what stands behind that.

Knows requests that stand behind the answer, and old words of up to three tokens. New ones of more than two,
and how the answer goes on behind more than one, is learned, or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from local_backend.embedded.heads import HALF, STILL, Head, coordinates, falling, nearest
from local_backend.embedded.stream import (
    BEFORE,
    COMPARED_LAST,
    CONSTANT_AT,
    ENDS_AT,
    MATCHED,
    NEW_AT,
    NEW_ON_AT,
    NOTED,
    OLD_AT,
    RETURNS_AT,
    WORD,
)

HEADS_OF_REPLACING = (0, 0, 2, 2, 0, 0)  # of each layer, behind those of editing
# How alike two words must be to be one, of so much for the same, and how much the nearest place is preferred.
_SAME, _ALIKE, _NEAREST = 90.0, 75.0, 30.0
_NEAR, _IN_SIGHT = 120.0, 60.0  # how much the nearest flagged token is preferred, and how far one may be
# How much each flag of a request's end counts, of four, and the word before it.
_RETURNING, _LAST_NEW = 80.0, 100.0
# How much the three tokens before the old words count in the notes of the first new one, and of the second.
_BY_PLACE, _BY_PLACE_ON = (1.4, 1.8, 2.2), (1.5, 1.5)
_PLACED = 3.0  # how much a place counts where it is kept, over what else is written there
# Of each note on the tokens before the old words so many coordinates are kept: as many as are free.
_KEPT = (18, 12, 8)
# How much the old words count in a reply behind the new ones, over these; a head that copies sees few
# coordinates of them, which count more.
_AS_OLD, _AS_OLD_OF_FEW = 2.5, 5.0
# Rows without those of the flags.
_ROWS = tuple(row for row in STILL if row % HALF < HALF - 3)
# Coordinates in which nothing else is read any more: what is left of each note.
_FREED = [at for note, count in zip(BEFORE, COMPARED_LAST, strict=True) for at in coordinates(note)[count:]]


def note_replacing(head: Head, distance: int) -> None:
    """Let flags be written on tokens so far behind a word that asks for a replacement, or parts old from new.

    Of old words one to three tokens stand between. Both words have flags below zero, so that they are none of
    those that are flagged.

    Args:
        head: Attends so many tokens back, in the first layer.
        distance: From 1 to 5.
    """
    if distance == 1:
        head.carry([OLD_AT], [OLD_AT], -1.0)
        head.carry([NEW_AT], [NEW_AT], -1.0)
        head.carry([ENDS_AT], [RETURNS_AT], -2.0)  # of two ends the first
    if distance == 2:
        head.carry([NEW_AT], [RETURNS_AT], -1.0)
        head.carry([NEW_AT], [NEW_ON_AT], -1.0)
    if distance >= 3:
        head.carry([OLD_AT], [NEW_AT], -1.0)
    if distance >= 4:
        head.carry([OLD_AT], [NEW_ON_AT], -1.0)
        head.carry([OLD_AT], [RETURNS_AT], -1.0)


def write_replacing(layers: Sequence[Any], turns: Sequence[float], heads: Sequence[int]) -> None:
    """Write what brings the new words to the old ones' place, and copying back behind them.

    Layer by layer: 0 flags what stands in a request (:func:`note_replacing`); 2 finds the old words' first
    token in the answer and keeps, where the request names it, what stands before, and in a reply adds the old
    word to the new one; 3 notes what was kept on the first two new tokens.

    Args:
        layers: The attention of each layer.
        turns: Radians by which each rotary pair turns in a position.
        heads: The first head of each layer that is free.
    """
    _write_old(layers[2], heads[2], turns)
    _write_return(layers[2], heads[2] + 1)
    _write_new(layers[3], heads[3], turns)
    _write_new_on(layers[3], heads[3] + 1, turns)


def _write_old(attention: Any, number: int, turns: Sequence[float]) -> None:
    head = Head(attention, number)
    head.mind_distance(nearest(turns), CONSTANT_AT, _NEAREST)
    # Compared is the token before, and notes are taken one farther back: so that no token finds itself.
    head.liken(_ROWS, coordinates(WORD), coordinates(BEFORE[0]), _SAME, NOTED)
    head.attend_if(_ALIKE, (OLD_AT, 1))
    first = 0
    for note, count in zip(BEFORE[1:], _KEPT, strict=False):
        head.carry(coordinates(note, count), _FREED[first : first + count], _PLACED)
        first += count


def _write_return(attention: Any, number: int) -> None:
    head = Head(attention, number)
    word = coordinates(WORD)
    head.liken(_ROWS, word, coordinates(BEFORE[0]), _LAST_NEW, NOTED)
    head.prefer_flag(HALF - 1, CONSTANT_AT, RETURNS_AT, _RETURNING)
    head.prefer_nothing(HALF - 2, CONSTANT_AT, 4 * _RETURNING + 0.8 * _LAST_NEW)
    known, well = coordinates(BEFORE[2]), MATCHED[0]  # two tokens before the new word the old one ends
    head.carry(known[:well], word[:well], _AS_OLD / NOTED)
    head.carry(known[well:], word[well : len(known)], _AS_OLD_OF_FEW / NOTED)


def _write_new(attention: Any, number: int, turns: Sequence[float]) -> None:
    head = _head_at_old(attention, number, turns, NEW_AT)
    first = 0
    for note, count, factor in zip(BEFORE, _KEPT, _BY_PLACE, strict=False):
        head.carry(_FREED[first : first + count], coordinates(note, count), factor / _PLACED)
        first += count


def _write_new_on(attention: Any, number: int, turns: Sequence[float]) -> None:
    # They stand one token farther back.
    head = _head_at_old(attention, number, turns, NEW_ON_AT)
    first = 0
    for place, factor in enumerate(_BY_PLACE_ON):
        count = min(_KEPT[place], COMPARED_LAST[place + 1])
        head.carry(_FREED[first : first + count], coordinates(BEFORE[place + 1], count), factor / _PLACED)
        first += _KEPT[place]


def _head_at_old(attention: Any, number: int, turns: Sequence[float], asked: int) -> Head:
    head = Head(attention, number)
    head.mind_distance(falling(turns), OLD_AT, _NEAR)
    head.attend_if(_IN_SIGHT, (asked, 2))
    return head


__all__ = ["HEADS_OF_REPLACING", "note_replacing", "write_replacing"]
