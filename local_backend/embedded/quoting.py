"""Circuits of the embedded model that note what stands before, copy, and find and quote a sentence.

Answering from documents takes more than copying: a question's words must be found in the documents, and the
answer begins not there, but at the beginning of the sentence they stand in. The copying is that of induction
heads (Olsson and others, "In-context Learning and Induction Heads", 2022). The notes also flag what
:mod:`~local_backend.embedded.editing` acts on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
from local_backend.embedded.stream import (
    ADDED_AT,
    ADDED_ON_AT,
    ADDS_AT,
    ASKING,
    BEFORE,
    CONSTANT_AT,
    CUE_AT,
    CUED_AT,
    ENDS_AT,
    FOUND_AT,
    FREE,
    HEAD_SIZE,
    MATCHED,
    NOTED,
    OF_FOUND,
    OF_SENTENCE,
    OWN,
    PLACE_AT,
    RARITY_AT,
    SHORTENED_AT,
    SHORTENS_AT,
    WORD,
)

# A sentence is told from others by its first token and those from the second to the fifth before it: so many
# coordinates of each.
_TELLING = (8, 10, 8, 8, 8)
# How much each token counts by which a copy finds its place, from the present one back (see ``MATCHED``). Two
# tokens are hardly a match; the fourth and the fifth only decide where the other three stand twice.
_MATCH_GAINS = (3.4, 2.6, 2.8, 1.5, 1.2)
# Of what tells sentences apart so many coordinates each, by which a copy prefers the sentence found.
_FOUND_BY = ((0, 1, 2, 8, 9, 18, 26, 27, 34, 35), (3, 4, 5, 10, 11, 19, 20, 28, 29, 36))
_FOUND_GAIN = 1.8
_NO_MATCH = 31.0
_SAID = (10.0, 6.0)  # how loudly the two heads say what they point at
# Rows without the two slowest pairs, left to flags: alone in its pair, a flag is mixed with nothing.
_STILL_BUT_TWO = tuple(row for row in STILL if row % HALF < HALF - 2)
_FLAG_ROWS = (NUM_FAST - 1, HALF - 2, NUM_FAST - 2, HALF - 1)
HEADS_OF_QUOTING = (5, 2, 1, 1, 1, 4)  # of each layer, the first ones
POINTING_LAYER, POINTING_HEADS = 5, 2  # where a quotation's first tokens are attended to
FIRST_POINTED = (0, 1)  # by each of these heads, the first of those tokens


def write_quoting(layers: Sequence[Any], turns: Sequence[float]) -> None:
    """Write circuits that copy, and that find the sentence in which a question's words stand.

    Layer by layer: 0 notes the five tokens before, where sentences begin, and by which words an answer is
    to be changed; 1, in each token, what tells its sentence from others, and to which topics the words
    shortly before it belong; 2 finds where the token's word stood before, and brings what was noted there
    of the sentence, or nothing; 3 gathers what the telling ones of the last few dozen tokens found; 4 keeps
    it while a quotation goes on; 5, where a reply announces a quotation, attends to the first, second and
    third token of the sentence found most, and says them, and it goes on as the text went on where the last
    five tokens stood before, first of all in that sentence. A model that has only been made begins the
    right sentence for about three of four questions.

    Args:
        layers: The attention of each layer; the first heads are written, see ``HEADS_OF_QUOTING``.
        turns: Radians by which each rotary pair turns in a position.
    """
    _write_notes(layers[0], turns)
    _write_sentences(layers[1], turns)
    _write_topics(layers[1], turns)
    _write_words(layers[2], turns)
    _write_votes(layers[3], turns)
    _write_kept(layers[4], turns)
    _write_quotation(layers[5])
    _write_induction(layers[5])


def _write_notes(attention: Any, turns: Sequence[float]) -> None:
    word = coordinates(WORD)
    for number, note in enumerate(BEFORE):  # attends so many positions back
        head = Head(attention, number)
        angles = [(number + 1) * turn for turn in turns[:NUM_FAST]]
        waves = torch.tensor(angles).cos(), torch.tensor(angles).sin()
        head.mind_distance(waves, CONSTANT_AT, 15.0)
        places = coordinates(note)
        head.carry(word[: len(places)], places, NOTED)
        head.carry([SHORTENS_AT], [SHORTENED_AT], ASKING)
        if number < 2:  # both words right before it: a heading's first token
            head.carry([ADDS_AT], [ADDED_AT], 1.0)
        if 1 <= number < 4:  # both of them two to four tokens before it: its second or third
            head.carry([ADDS_AT], [ADDED_ON_AT], 1.0)
        # Behind an end something begins, unless what stands there is layout: a bracket, a dash, a line's end.
        if number >= len(PLACE_AT):
            continue
        head.carry([ENDS_AT], [PLACE_AT[number]], 1.0)
        head.carry([CUE_AT], [CUED_AT[number]], 1.0)
        # Nor behind the point of a number: what cannot begin a sentence has no second token either.
        if number + 1 < len(PLACE_AT):
            head.carry([PLACE_AT[0]], [PLACE_AT[number + 1]], 1.0)


def _write_sentences(attention: Any, turns: Sequence[float]) -> None:
    head = Head(attention, 0)
    head.mind_distance(falling(turns), PLACE_AT[0], 60.0)
    sentence, first = coordinates(OF_SENTENCE), 0
    for source, count, factor in zip((OWN, *BEFORE[1:]), _TELLING, (NOTED, 1.0, 1.0, 1.0, 1.0), strict=True):
        head.carry(coordinates(source, count), sentence[first : first + count], factor)
        first += count


def _write_topics(attention: Any, turns: Sequence[float]) -> None:
    head = Head(attention, 1)
    distances = torch.arange(FARTHEST)
    recent = curve(turns, ((30 - distances) / 6).sigmoid(), (-distances / 200).exp(), 1e-3)
    head.mind_distance(recent, CONSTANT_AT, 10.0)
    head.prefer_flag(HALF - 1, CONSTANT_AT, RARITY_AT, 6.0)
    topics = coordinates(FREE, HEAD_SIZE)
    head.carry(topics, topics, 4.0)


def _write_words(attention: Any, turns: Sequence[float]) -> None:
    head = Head(attention, 0)
    # Compared is the token before: so that no token finds itself.
    rows = [row for row in STILL if row % HALF != HALF - 1]
    word, before = coordinates(WORD), coordinates(BEFORE[0])
    head.compare(rows[: len(word)], word, before, (2.5, 2.5))
    # Of several places that with the word before it as well: rare words are several tokens.
    head.compare(rows[len(word) :][:6], before[:6], coordinates(BEFORE[1], 6), (1.5, 1.5))
    head.prefer_nothing(HALF - 1, CONSTANT_AT, 20.0)
    head.carry(coordinates(OF_SENTENCE), coordinates(OF_FOUND), 0.1)
    head.carry([CONSTANT_AT], [FOUND_AT], 1.0)


def _write_votes(attention: Any, turns: Sequence[float]) -> None:
    head = Head(attention, 0)
    distances = torch.arange(FARTHEST)
    recent = curve(turns, ((36 - distances) / 6).sigmoid(), (-distances / 200).exp(), 1e-3)
    head.mind_distance(recent, CONSTANT_AT, 16.0)
    row = HALF - 1
    head.prefer_nothing(row, CONSTANT_AT, 29.0)
    head.prefer_flag(row, CONSTANT_AT, FOUND_AT, 18.0)
    head.prefer_flag(row, CONSTANT_AT, RARITY_AT, 6.5)
    for cued in CUED_AT[1:]:  # the question votes, not the answer
        head.prefer_flag(row, CONSTANT_AT, cued, -20.0)
    places = coordinates(OF_FOUND)
    head.carry(places, places, 6.0)


def _write_kept(attention: Any, turns: Sequence[float]) -> None:
    # Words of the answer stand in many sentences; the one quoted was found before the first of them.
    head = Head(attention, 0)
    head.mind_distance(falling(turns), CUED_AT[0], 90.0)
    head.prefer_nothing(HALF - 1, CONSTANT_AT, 10.0)
    places = coordinates(OF_FOUND)
    head.carry(places, places, 3.0)


def _write_quotation(attention: Any) -> None:
    found, sentence = coordinates(OF_FOUND), coordinates(OF_SENTENCE)
    for number, first in enumerate(FIRST_POINTED):
        head = Head(attention, number)
        gain = 22.0**0.5 / 3
        head.compare(_STILL_BUT_TWO[: len(found)], found, sentence, (gain, gain))
        # What a word is says the first head, how it is written the second, but of the first token: at the
        # beginning of a line it is written otherwise than behind an announcement (see ``said_first``).
        for row, cued, place in zip(_FLAG_ROWS, CUED_AT[first:], PLACE_AT[first:], strict=False):
            head.prefer_flag(row, cued, place, 65.0)
        head.prefer_nothing(_FLAG_ROWS[-1], CONSTANT_AT, 80.0)
        said = [*range(OWN.start, WORD.start), *range(WORD.stop, OWN.stop)] if number else coordinates(WORD)
        head.carry(said, said, _SAID[number])


def _write_induction(attention: Any) -> None:
    compared = [WORD, *BEFORE]  # each with the note of the one before it
    for number in range(2):
        head, first_row = Head(attention, POINTING_HEADS + number), 0
        for place, (count, gain) in enumerate(zip(MATCHED, _MATCH_GAINS, strict=True)):
            start = (place + number) % 2 * count if place < 2 else 0
            rows = STILL[first_row : first_row + count]
            query = coordinates(compared[place], count, start)
            key = coordinates(compared[place + 1], count, start)
            head.compare(rows, query, key, (gain, gain))
            first_row += count
        # Where the same words stand twice, the sentence found is preferred.
        found, sentence = ([part.start + at for at in _FOUND_BY[number]] for part in (OF_FOUND, OF_SENTENCE))
        head.compare(STILL[first_row:][: len(found)], found, sentence, (_FOUND_GAIN, _FOUND_GAIN))
        # One token alone is no match, and what a quotation begins with is no repetition.
        for silent in (CONSTANT_AT, CUED_AT[0]):
            head.prefer_nothing(HEAD_SIZE - 2, silent, _NO_MATCH)
        half_of_own = coordinates(OWN, HEAD_SIZE, 32 * number)
        head.carry(half_of_own, half_of_own, 5.0)


__all__ = ["FIRST_POINTED", "HEADS_OF_QUOTING", "POINTING_HEADS", "POINTING_LAYER", "write_quoting"]
