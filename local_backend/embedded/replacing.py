"""Circuits of the embedded model that replace words of an answer by others.

A request names old words and new ones. Its first two new tokens are given the notes of the place at which the
old words stand in the answer: copying goes on with them there, as with what is to be added (see
:mod:`~local_backend.embedded.editing`). Where the new words end, a reply looks as if the old ones had been
said, and copying goes on behind these. New words of more tokens are copied as anything is.

Layer by layer: 0 flags what stands near a word that asks for a replacement; 1 finds the old words in the
answer, behind the first of their tokens and behind the last, and keeps the notes on what stands before; 2
writes those of the first place on the new tokens, and hands those of the second on to what ends the request;
3 writes them on the last new token in a reply, and on the token behind it.

Knows requests that stand behind the answer, old words of up to four tokens that stand in the answer once, and
new ones of up to a dozen. Is written into a model that was trained for a while: its heads and coordinates are
those that such a model misses least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from local_backend.embedded.heads import (
    ASKED,
    HALF,
    NUM_FAST,
    STILL,
    Head,
    coordinates,
    falling,
    nearest_other,
)
from local_backend.embedded.quoting import COPYING_HEADS
from local_backend.embedded.stream import (
    BEFORE,
    COMPARED_LAST,
    CONSTANT_AT,
    CONSTANT_READ,
    ENDS_AT,
    HEAD_SIZE,
    NEAR_AT,
    NOTED,
    OWN,
    PARTED_AT,
    PARTS_AT,
    PLACE_AT,
    READ,
    SHORTENED_AT,
    WORD,
)

# Layers and heads, in the order in which they are written below.
HEADS_OF_REPLACING = ((1, 4), (2, 2), (2, 4), (2, 3), (3, 2), (3, 3))
# Of each note so many coordinates are kept, in place of the code of the token that keeps them, which is told
# by what is left of it. They count more than the code.
_KEPT = (18, 16, 12, 8, 8)
_TELLING = slice(OWN.start + sum(_KEPT), OWN.stop)
_KEEPING = 4.0
# The old words are found by so many coordinates of the last of their tokens, and of the one before.
_FOUND_BY = (26, 14)
_FOUND, _FOUND_BEFORE, _IS_FOUND, _NEAREST = 100.0, 30.0, 85.0, 30.0
# Where they are looked for: near the word that asks, and two tokens behind it or where the new words begin.
_NEAR, _AT_OLD, _AT_NEW, _HERE = 2.0, 3.0, 3.0, 4.6
# How much a near token is preferred to a far one, some sixteen tokens back, over what it is.
_IN_SIGHT = 100.0
_OF_REQUEST, _BEHIND_OLD, _IS_OLD = 20.0, 80.0, 166.0
_PARTS, _REPLY, _IS_PART = 100.0, 215.0, 232.0
# How much tokens before the old words count in the notes of the first new token, and of the second.
_BY_PLACE, _BY_PLACE_ON = (1.8, 2.2, 2.6, 1.2), (1.8, 2.2, 1.2)
_END, _SILENT = 5.0, -12.0  # flags of a request's end: what it is, and that it is not to be said
# What tells that new words end: the last of them, the one before, and what stands behind in the request.
_LAST, _BEFORE_LAST, _IS_LAST = 120.0, 25.0, 260.0
_BEHIND_LAST, _BEHIND_MESSAGE, _ONLY_ONE = 32.0, 25.0, 23.0
_AS_OLD = 1.6  # how much the old words count behind the new ones, over these
_SAID = 8.0  # how much those who copy prefer what is said near a request's first word
# Rows without those of flags.
_ROWS = tuple(row for row in STILL if row % HALF < HALF - 3)


@dataclass(frozen=True)
class OfRequests:
    """Embeddings of the tokens of which requests are made.

    Attributes:
        replace: What a request begins with, ``[1, hidden size]``.
        parts: What parts old words from new, ``[tokens, hidden size]``.
        ends: What ends a request, ``[tokens, hidden size]``.
        reply: What a reply begins with, ``[1, hidden size]``.
    """

    replace: Tensor
    parts: Tensor
    ends: Tensor
    reply: Tensor


def note_replacing(attention: Any) -> None:
    """Let the notes of the first layer carry flags, in rows they do not use.

    Up to five tokens behind the word that asks all are near; two tokens behind what parts old words from new
    stands the second of these.
    """
    values, written = attention.v_proj.weight, attention.o_proj.weight
    for number in range(len(BEFORE)):
        rows = number * HEAD_SIZE + torch.arange(HEAD_SIZE)
        free = [int(row) for row in rows if not values[row].any() and not written[:, row].any()]
        flags = ((NEAR_AT, NEAR_AT), (PARTS_AT, PARTED_AT))[: 2 if number == 1 else 1]
        for (source, target), row in zip(flags, free, strict=False):
            values[row, source] = 1 / READ
            written[target, row] = 1.0


def write_replacing(layers: Sequence[Any], turns: Sequence[float], words: OfRequests) -> None:
    """Write the circuits.

    Args:
        layers: The attention of each layer.
        turns: Radians by which each rotary pair turns in a position.
        words: Of requests.
    """
    heads = iter([Head(layers[layer], number) for layer, number in HEADS_OF_REPLACING])
    _write_old(next(heads), turns, words)
    _write_new(next(heads), turns, words)
    _write_new_on(next(heads), turns, words)
    _write_end(next(heads), turns, words)
    _write_return(next(heads), words, WORD, *BEFORE[:4])
    _write_return(next(heads), words, *BEFORE)
    for number in COPYING_HEADS:
        row = number * HEAD_SIZE + NUM_FAST - 1  # of those that tell distances the one that turns least
        layers[-1].q_proj.weight[row, CONSTANT_AT] = 1.0
        layers[-1].k_proj.weight[row, NEAR_AT] = _SAID / CONSTANT_READ**2 * HEAD_SIZE**0.5


def _write_old(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    # Both tokens hold notes on what comes before, and look for the place that has the same ones.
    head.mind_distance(nearest_other(turns), CONSTANT_AT, _NEAREST)
    first = 0
    for note, count, wanted in zip(BEFORE, _FOUND_BY, (_FOUND, _FOUND_BEFORE), strict=False):
        at = coordinates(note, count)
        head.liken(_ROWS[first:], at, at, wanted, NOTED**2)
        first += count
    head.prefer_nothing(HALF - 2, CONSTANT_AT, _IS_FOUND + _HERE * ASKED)
    head.prefer_nothing(HEAD_SIZE - 2, NEAR_AT, -_NEAR * ASKED)
    head.prefer_nothing(HEAD_SIZE - 3, PARTS_AT, -_AT_NEW * ASKED)
    head.prefer_nothing(HALF - 1, PARTED_AT, _AT_NEW * ASKED)
    _ask_for(head, BEFORE[1], words.replace[:, WORD] * NOTED, _AT_OLD)
    for place, note in enumerate(BEFORE):
        head.carry(coordinates(note, _KEPT[place]), _kept(place), _KEEPING)
    head.carry([CONSTANT_AT], [PARTS_AT], 1.0)  # where the new words begin, once more


def _write_new(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    _attend_to_old(head, turns, words)
    _ask_for(head, BEFORE[0], words.parts[:, WORD] * NOTED, 1.0)
    for place, factor in enumerate(_BY_PLACE):
        count = min(_KEPT[place + 1], COMPARED_LAST[place])
        # Of the second note only three quarters are kept; one of those who copy sees half of its own.
        seen_half = torch.arange(count) >= COMPARED_LAST[place] // 2 if place == 1 else torch.zeros(count)
        factors = torch.diag(factor / _KEEPING * (1.0 + seen_half.float()))
        head.carry(_kept(place + 1)[:count], coordinates(BEFORE[place], count), factors)
    _without_codes(head, words.parts)


def _write_new_on(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    # They stand one token farther back.
    _attend_to_old(head, turns, words)
    head.prefer_nothing(HALF - 3, PARTED_AT, -ASKED)
    head.prefer_nothing(HEAD_SIZE - 2, ENDS_AT, ASKED)  # no second new token
    head.prefer_nothing(HEAD_SIZE - 3, SHORTENED_AT, ASKED)
    for place, factor in enumerate(_BY_PLACE_ON, 1):
        count = min(_KEPT[place], COMPARED_LAST[place])
        head.carry(_kept(place)[:count], coordinates(BEFORE[place], count), factor / _KEEPING)
    _without_codes(head, words.parts)


def _attend_to_old(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    """Let a head, if it is asked once, attend to what stands behind the first old token."""
    head.mind_distance(falling(turns), CONSTANT_AT, _IN_SIGHT)
    head.prefer_flag(HALF - 1, CONSTANT_AT, NEAR_AT, _OF_REQUEST)
    _seek(head, BEFORE[1], words.replace[:, WORD] * NOTED, [_BEHIND_OLD])
    head.prefer_nothing(HALF - 2, CONSTANT_AT, _IS_OLD + ASKED)


def _write_end(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    head.mind_distance(falling(turns), CONSTANT_AT, _IN_SIGHT)
    head.prefer_flag(HALF - 1, CONSTANT_AT, PARTS_AT, _PARTS)
    # An end in a reply, shortly behind the request, looks for the reply's beginning, and brings nothing.
    known = torch.cat([words.reply, words.parts])
    _seek(head, _TELLING, torch.cat([known, words.replace])[:, _TELLING], [_REPLY, *[0.0] * len(known)])
    head.attend_if(_IS_PART, (ENDS_AT, 1), (SHORTENED_AT, 0))
    head.prefer_nothing(HEAD_SIZE - 3, PLACE_AT[0], ASKED)  # of two ends the first
    for place, count in enumerate(COMPARED_LAST):
        head.carry(_kept(place)[:count], _kept(place)[:count], 1.0)
    _without_codes(head, words.parts)
    head.carry([CONSTANT_AT], [ENDS_AT], _END)
    head.carry([CONSTANT_AT], [NEAR_AT], _SILENT)
    is_reply = _product(known[:, _TELLING], [1.0, *[0.0] * len(words.parts)])
    head.carry_nothing_of(words.reply[0], coordinates(_TELLING), is_reply)


def _write_return(head: Head, words: OfRequests, *targets: slice) -> None:
    """Where the first two targets hold the last new words, write the old ones, and what stood before them.

    Args:
        head: Of the third layer.
        words: Of requests.
        targets: For each kept note where it is written.
    """
    first = 0
    for query, key, count, wanted in zip(targets, BEFORE, COMPARED_LAST, (_LAST, _BEFORE_LAST), strict=False):
        scale = _noted(query) * NOTED
        head.liken(_ROWS[first:], coordinates(query, count), coordinates(key, count), wanted, scale)
        first += count
    row = HALF - 1
    head.prefer_flag(row, CONSTANT_AT, ENDS_AT, _BEHIND_LAST)
    head.prefer_flag(row, CONSTANT_AT, SHORTENED_AT, _BEHIND_MESSAGE)  # whose flag is one less
    head.prefer_flag(row, CONSTANT_AT, PARTED_AT, _ONLY_ONE)  # before it another word stands in the request
    head.prefer_nothing(HALF - 2, CONSTANT_AT, _IS_LAST)
    for place, target in enumerate(targets):
        seen = COMPARED_LAST[BEFORE.index(target)] if target in BEFORE else COMPARED_LAST[0]
        count = min(COMPARED_LAST[place], seen)
        factor = _AS_OLD / _KEEPING * _noted(target) / NOTED
        head.carry(_kept(place)[:count], coordinates(target, count), factor)
    _without_codes(head, words.ends)


def _noted(part: slice) -> float:
    """How much larger a code is there than in a token's own."""
    return NOTED if part in BEFORE else 1.0


def _kept(place: int) -> list[int]:
    """The coordinates in which a note is kept."""
    return coordinates(OWN, _KEPT[place], sum(_KEPT[:place]))


def _product(codes: Tensor, values: Sequence[float]) -> Tensor:
    """The shortest vector whose products with codes, ``[codes, coordinates]``, are these values."""
    known = codes.double()
    solved: Tensor = torch.linalg.solve(known @ known.T, torch.tensor(values, dtype=torch.double))
    return solved.float() @ codes


def _ask_for(head: Head, place: slice, codes: Tensor, count: float) -> None:
    """Ask a head so many times where a query holds one of some codes."""
    at = coordinates(place)
    head.ask_code(HALF - 3, at, _product(codes[:, : len(at)], [1.0] * len(codes)), count * ASKED)


def _seek(head: Head, place: slice, codes: Tensor, gains: Sequence[float]) -> None:
    """Prefer keys that hold one of some codes, each by its gain."""
    at = coordinates(place)
    code = _product(codes[:, : len(at)], gains)
    head.seek(HALF - 1, CONSTANT_AT, at, code, float(code.square().sum()))


def _without_codes(head: Head, tokens: Tensor) -> None:
    """Let a head carry what some tokens keep without their own codes."""
    codes = tokens.clone()
    codes[:, _TELLING.stop :] = 0.0
    for number, code in enumerate(codes):
        is_it = _product(codes[:, _TELLING], [float(other == number) for other in range(len(codes))])
        head.carry_nothing_of(code, coordinates(_TELLING), is_it)


__all__ = ["HEADS_OF_REPLACING", "OfRequests", "note_replacing", "write_replacing"]
