"""Circuits of the embedded model that replace words of an answer by others.

A request names old words and new ones. Its first new token is given the notes of the place at which the old
words stand in the answer, and is said there; where a reply says new words, it goes on in the request; and
behind the last of them it is noted as if the old ones had been said, so that copying goes on behind these
(see :mod:`~local_backend.embedded.quoting`).

Layer by layer: 0 flags what stands near "Replace", and what stands behind "by" or "with"; 1 finds the old
words in the answer and keeps what is noted where they end; 2 notes it on the first new token, and keeps it
once more where the request ends; 3 notes it in the reply behind the new words.

Knows requests that stand behind the answer, and old words of up to four tokens. Written into a trained model:
it needs six heads and two coordinates, of those that training misses least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from local_backend.embedded.heads import (
    FARTHEST,
    HALF,
    NUM_FAST,
    STILL,
    Head,
    coordinates,
    curve,
    falling,
)
from local_backend.embedded.quoting import POINTING_HEADS
from local_backend.embedded.stream import (
    BEFORE,
    COMPARED_LAST,
    CONSTANT_AT,
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
    UNIQUE,
    WORD,
)

# The heads, in the order of the functions below: of those left to training, what it does with these is missed
# least.
HEADS_OF_REPLACING = ((1, 4), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3))
# What is noted where the old words end is kept in a request's tokens, in place of their own codes.
_KEPT = (18, 16, 12, 8, 8)
_KEEPING = 4.0  # how much it counts there, over the codes
_NUM_COMPARED = (26, 14)  # coordinates by which the old words are found: of the last of them, and before it
_FOUND, _FOUND_BEFORE, _IS_FOUND = 100.0, 30.0, 85.0
_NEAREST = 30.0
_IN_SIGHT = 100.0
_ASKED = 200.0
_SILENT = -12.0  # flag for those who copy
_SAID = 8.0
_END, _IS_END = (
    5.0,
    32.0,
)  # flag of the end of such a request, over the flag all ends have; how much it is preferred
_BY_PLACE = (1.8, 2.2, 2.6, 1.2)  # how much the tokens before the old words count in the notes of the new one
_BY_FURTHER = (1.8, 2.2, 1.2)
_AS_OLD = 1.6  # how much the old words count behind the new ones, over these
# What is left of a token's own code, where it is told by it.
_TELLING = slice(OWN.start + sum(_KEPT), OWN.stop)
# Rows without those of flags.
_ROWS = tuple(row for row in STILL if row % HALF < HALF - 3)


@dataclass(frozen=True)
class OfRequests:
    """Codes of the words of which requests are made, as embeddings, each ``[tokens, hidden size]``.

    Attributes:
        replace: What such a request begins with.
        by: What parts old words from new.
        ends: What ends such a request.
        reply: What a reply begins with, ``[hidden size]``.
    """

    replace: Tensor
    by: Tensor
    ends: Tensor
    reply: Tensor


def note_replacing(attention: Any) -> None:
    """Let the notes of the first layer carry flags: what stands up to five tokens behind "Replace", or "by"."""
    for number in range(len(BEFORE)):
        rows = number * HEAD_SIZE + torch.arange(HEAD_SIZE)
        values, written = attention.v_proj.weight, attention.o_proj.weight
        free = [int(row) for row in rows if not values[row].any() and not written[:, row].any()]
        noted = ((NEAR_AT, NEAR_AT), (PARTS_AT, PARTED_AT))[: 2 if number == 1 else 1]
        for (source, target), row in zip(noted, free, strict=False):
            values[row, source] = 1 / READ
            written[target, row] = 1.0


def write_replacing(layers: Sequence[Any], turns: Sequence[float], words: OfRequests) -> None:
    """Write the circuits.

    Args:
        layers: The attention of each layer.
        turns: Radians by which each rotary pair turns in a position.
        words: Of requests.
    """
    heads = iter(Head(layers[layer], number) for layer, number in HEADS_OF_REPLACING)
    _write_old(next(heads), turns, words)
    _write_new(next(heads), turns, words)
    _write_end(next(heads), turns, words)
    _write_further(next(heads), turns, words)
    _write_return(next(heads), words, 0)
    _write_return(next(heads), words, 1)
    for number in range(2):
        last = layers[-1]
        row = (POINTING_HEADS + number) * HEAD_SIZE + NUM_FAST - 1
        last.q_proj.weight[row, CONSTANT_AT] = 1.0
        last.k_proj.weight[row, NEAR_AT] = _SAID / 9.0 * HEAD_SIZE**0.5


def _kept(place: int) -> list[int]:
    """Coordinates in which so many tokens' notes back are kept."""
    first = OWN.start + sum(_KEPT[:place])
    return list(range(first, first + _KEPT[place]))


def _telling(codes: Tensor, values: Sequence[float]) -> Tensor:
    """The shortest vector whose products with codes, ``[codes, coordinates]``, are these values."""
    known = codes.double()
    return torch.linalg.solve(known @ known.T, torch.tensor(values, dtype=torch.double)).float() @ codes


def _ask_for(head: Head, row: int, place: slice, codes: Tensor, scale: float, count: float) -> None:
    """Let a query that holds the code of one of some words attend to nothing by so many flags less."""
    at = coordinates(place)
    head.ask_code(row, at, _telling(codes[:, : len(at)] * scale, [1.0] * len(codes)), count * _ASKED)


def _seek(head: Head, at: list[int], codes: Tensor, gains: Sequence[float]) -> None:
    """Prefer keys that hold the code of one of some words, by its gain."""
    code = _telling(codes, gains)
    head.seek(HALF - 1, CONSTANT_AT, at, code, float(code.square().sum()))


def _without_codes(head: Head, tokens: Tensor) -> None:
    """Let the head carry what is kept in some tokens without their own codes."""
    kept = tokens.clone()
    kept[:, _TELLING.stop :] = 0.0
    for number, token in enumerate(kept):
        known = _telling(tokens[:, _TELLING], [float(place == number) for place in range(len(tokens))])
        head.carry_nothing_of(token, coordinates(_TELLING), known)


def _write_old(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    # Behind the first old token, and where the old words end: both are notes on what comes before.
    distances = torch.arange(FARTHEST)
    near = ((1 + FARTHEST / 30) / (1 + distances / 30)).log() / 3
    wanted = near - 8.0 * (-(distances.float() ** 2)).exp()  # no token finds itself
    weight = 1 / (1 + distances / 60) + 8.0 * (distances < 1)
    head.mind_distance(curve(turns, wanted, weight, 1e-5), CONSTANT_AT, _NEAREST)
    first = 0
    for note, count, gain in zip(BEFORE, _NUM_COMPARED, (_FOUND, _FOUND_BEFORE), strict=False):
        at = coordinates(note, count)
        head.liken(_ROWS[first:], at, at, gain, NOTED**2)
        first += count
    # Near "Replace", and two tokens behind it, or a word that parts; no new words.
    head.prefer_nothing(HALF - 2, CONSTANT_AT, _IS_FOUND + 4.6 * _ASKED)
    head.prefer_nothing(HEAD_SIZE - 2, NEAR_AT, -2 * _ASKED)
    head.prefer_nothing(HALF - 1, PARTED_AT, 3 * _ASKED)
    head.prefer_nothing(HEAD_SIZE - 3, PARTS_AT, -3 * _ASKED)
    _ask_for(head, HALF - 3, BEFORE[1], words.replace[:, WORD], NOTED, 3.0)
    for place, note in enumerate(BEFORE):
        head.carry(coordinates(note, _KEPT[place]), _kept(place), _KEEPING)
    head.carry([CONSTANT_AT], [PARTS_AT], 1.0)


def _head_at_old(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    """Let a head attend to the token behind the first old one, at most some sixteen tokens back."""
    head.mind_distance(falling(turns), CONSTANT_AT, _IN_SIGHT)
    head.prefer_flag(HALF - 1, CONSTANT_AT, NEAR_AT, 20.0)
    code = words.replace[0, WORD][: BEFORE[1].stop - BEFORE[1].start] * NOTED
    head.seek(HALF - 1, CONSTANT_AT, coordinates(BEFORE[1]), code, 80.0)
    head.prefer_nothing(HALF - 2, CONSTANT_AT, 166.0 + _ASKED)


def _write_new(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    _head_at_old(head, turns, words)
    _ask_for(head, HALF - 3, BEFORE[0], words.by[:, WORD], NOTED, 1.0)
    for place, factor in enumerate(_BY_PLACE):
        count = min(_KEPT[place + 1], COMPARED_LAST[place])
        if place == 1:  # one of two heads sees half as many of them
            factor = torch.diag(torch.tensor([factor] * 8 + [2 * factor] * 4) / _KEEPING)
        else:
            factor = factor / _KEEPING
        head.carry(_kept(place + 1)[:count], coordinates(BEFORE[place], count), factor)
    _without_codes(head, words.by)


def _write_further(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    _head_at_old(head, turns, words)
    head.prefer_nothing(HALF - 3, PARTED_AT, -_ASKED)
    head.prefer_nothing(HEAD_SIZE - 2, ENDS_AT, _ASKED)
    head.prefer_nothing(HEAD_SIZE - 3, SHORTENED_AT, _ASKED)
    for place, factor in enumerate(_BY_FURTHER, 1):
        count = min(_KEPT[place], COMPARED_LAST[place])
        head.carry(_kept(place)[:count], coordinates(BEFORE[place], count), factor / _KEEPING)
    _without_codes(head, words.by)


def _write_end(head: Head, turns: Sequence[float], words: OfRequests) -> None:
    head.mind_distance(falling(turns), CONSTANT_AT, _IN_SIGHT)
    head.prefer_flag(HALF - 1, CONSTANT_AT, PARTS_AT, 100.0)
    codes = torch.cat([words.reply[None], words.by, words.replace])[:, _TELLING]
    _seek(head, coordinates(_TELLING), codes, (215.0, 0.0, 0.0, 0.0))
    head.attend_if(232.0, (ENDS_AT, 1), (SHORTENED_AT, 0))
    head.prefer_nothing(HEAD_SIZE - 3, PLACE_AT[0], _ASKED)  # of two ends the first
    for place, count in enumerate(COMPARED_LAST):
        head.carry(_kept(place)[:count], _kept(place)[:count], 1.0)
    _without_codes(head, words.by)
    head.carry([CONSTANT_AT], [ENDS_AT], _END)
    head.carry([CONSTANT_AT], [NEAR_AT], _SILENT)
    known = _telling(codes[:3], (1.0, 0.0, 0.0))
    head.carry_nothing_of(words.reply, coordinates(_TELLING), known)


def _write_return(head: Head, words: OfRequests, behind: int) -> None:
    """Behind the last new token, or one token behind that."""
    _match(head, words, behind, ENDS_AT, _IS_END)
    first = (WORD, *BEFORE)[behind:]
    for place, count in enumerate(COMPARED_LAST[: 5 - 0]):
        target = first[place] if place < len(first) else None
        if target is None:
            continue
        count = min(_KEPT[place], COMPARED_LAST[place], target.stop - target.start)
        if target is not WORD:
            count = min(count, COMPARED_LAST[BEFORE.index(target)])
        factor = _AS_OLD / _KEEPING / (NOTED if target is WORD else 1.0)
        head.carry(_kept(place)[:count], coordinates(target, count), factor)
    _without_codes(head, words.ends)


def _match(head: Head, words: OfRequests, behind: int, flag: int, gain: float) -> None:
    compared = (WORD, *BEFORE)
    first = 0
    for place, (count, wanted) in enumerate(zip(COMPARED_LAST, (120.0, 25.0), strict=False)):
        query, key = compared[place + behind], BEFORE[place]
        scale = NOTED if query is WORD else NOTED**2
        head.liken(_ROWS[first:], coordinates(query, count), coordinates(key, count), wanted, scale)
        first += count
    head.prefer_flag(HALF - 1, CONSTANT_AT, flag, gain)
    head.prefer_flag(HALF - 1, CONSTANT_AT, SHORTENED_AT, 25.0)
    # Before a new word of one token stands another than in the request.
    head.prefer_flag(HALF - 1, CONSTANT_AT, PARTED_AT, 23.0)
    head.prefer_nothing(HALF - 2, CONSTANT_AT, 260.0)


__all__ = ["HEADS_OF_REPLACING", "OfRequests", "note_replacing", "write_replacing"]
