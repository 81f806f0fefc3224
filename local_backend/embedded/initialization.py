"""Initial weights of the embedded model: random, but for layers that begin as circuits known to be useful.

Copying rests on induction heads: a head that attends to the token before, and in a layer above one that
finds where the present token stood before and brings what followed it (Olsson and others, "In-context
Learning and Induction Heads", 2022). Answering from documents takes more: a question's words must be found in
the documents, and the answer begins not there, but at the beginning of the sentence they stand in. From
random weights a model finds such circuits late, and until then it learns nothing from documents. Here they
are there from the first step, and training makes of them what it needs: the same idea as the mimetic
initialization of Trockman and Kolter (2023), with the parts written down.

Knows the layout of ``transformers``' Llama: heads stand side by side in the rows of the projections, and the
rotary embedding turns coordinate ``i`` of a head together with coordinate ``i + head_size / 2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

if TYPE_CHECKING:  # the tasks' models copy too, and need no corpus for it
    from local_backend.embedded.tokenization import TokenTraits

_EMBEDDING_SCALE = 0.05
_CONSTANT = 3.0  # of the last coordinate of every token's embedding, in units of the others
_NUM_FAST_PAIRS = 3  # of rotary coordinates, which tell neighbouring positions apart
_SLOWEST_TURN = 4e-3  # radians a position: what turns less can compare contents over hundreds of positions
_NUM_BEFORE = 3  # tokens before the present one that are compared
_NEIGHBOUR_GAIN, _MATCH_GAINS = 3.6, (3.0, 2.2, 1.8)


@torch.no_grad()
def begin_copying(model: LlamaForCausalLM) -> None:
    """Write the pair of layers into a model just made; the rest of its weights stays random.

    In the layer below, a head for each of the last three tokens notes which it was. In the layer above, two
    heads look for the place before which the same tokens stood, the last of them counting most, and bring the
    token that stands there.

    Args:
        model: With two layers, four heads and room for the notes; a smaller one is left as it is.
    """
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    half = size // 2
    base = float(dict(model.config.rope_parameters or {})["rope_theta"])
    turns = [base ** (-pair / half) for pair in range(half)]  # radians a position
    slow = torch.tensor([pair for pair, turn in enumerate(turns) if turn < _SLOWEST_TURN])
    block = 2 * len(slow) // _NUM_BEFORE  # coordinates of a head that compare one token
    noted = _NUM_BEFORE * block  # coordinates of a token that are noted
    # Coordinates of the residual stream: the token's own first, then notes on the one, two, three before it.
    own, notes = 2 * size, [2 * size + number * noted for number in range(_NUM_BEFORE)]
    if config.num_hidden_layers < 2 or config.num_attention_heads < 4 or not block:
        return
    if notes[-1] + noted >= config.hidden_size:
        return
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, _EMBEDDING_SCALE)
    embedding[:, -1] = _CONSTANT * _EMBEDDING_SCALE
    embedding[:, own : notes[-1] + noted] *= 0.2
    below, above = (layer.self_attn for layer in model.model.layers[:2])

    for head, note in enumerate(notes):  # attends so many positions back
        _clear(below, head, size)
        first = head * size
        for pair in range(min(_NUM_FAST_PAIRS, half)):
            angle = torch.tensor((head + 1) * turns[pair])
            below.q_proj.weight[first + pair, -1] = _NEIGHBOUR_GAIN
            below.k_proj.weight[first + pair, -1] = _NEIGHBOUR_GAIN * angle.cos()
            below.k_proj.weight[first + pair + half, -1] = _NEIGHBOUR_GAIN * angle.sin()
        columns = torch.arange(noted)
        below.v_proj.weight[first + columns, columns] = 0.3
        below.o_proj.weight[note + columns, first + columns] = _EMBEDDING_SCALE / 0.3

    places = torch.cat([slow, slow + half])
    for head in range(2):
        _clear(above, head, size)
        first = head * size
        for number, (note, gain) in enumerate(zip(notes, _MATCH_GAINS, strict=True)):
            rows = first + places[number * block : (number + 1) * block]
            compared = (torch.arange(block) + (number + head) * block) % noted
            present = compared if number == 0 else notes[number - 1] + compared
            above.q_proj.weight[rows, present] = gain
            above.k_proj.weight[rows, note + compared] = gain
        columns = torch.arange(size)
        above.v_proj.weight[first + columns, first + columns] = 0.5
        above.o_proj.weight[first + columns, first + columns] = 10 * _EMBEDDING_SCALE
    model.lm_head.weight.copy_(embedding)  # what is brought is said; of a tied head this changes nothing


# begin_quoting: the residual stream's coordinates, for a hidden size of 256. First a token's own code, in
# which what stands from 20 to 58 is the same for a word in any case, behind a space or not; then notes on
# the tokens one, two and three before it, on the first three of its sentence, and on those of the sentence
# where it stood before, which where an answer begins become those of the sentence to quote; at last single
# coordinates.
_HIDDEN_SIZE, _HEAD_SIZE, _NUM_LAYERS = 256, 64, 6
_OWN, _WORD, _UNIQUE = slice(0, 96), slice(20, 58), slice(58, 96)
_BEFORE = (slice(96, 120), slice(120, 144), slice(144, 156))
_OF_SENTENCE = (slice(156, 180), slice(180, 194), slice(194, 201))
_OF_FOUND = (slice(201, 225), slice(225, 239), slice(239, 246))
_RARITY_AT, _FOUND_AT, _LAYOUT_AT, _NOTHING_AT = 247, 248, 249, 250
_PLACE_AT = (251, 252, 253)  # whether the token is the first, the second, the third of a sentence
_ENDS_AT, _CONSTANT_AT = 254, 255
# Scale of the residual stream. As large as this, a step of training changes little of it, and the circuits
# outlive the first steps, in which the other layers write at random.
_NOTE, _USUAL_NOTE = 0.4, 0.05
_FLAG = 3 * _NOTE
_CODE = 0.92 * _NOTE  # of every coordinate of a token's own code, with a random sign
_EMBEDDING_NORM = 0.68 * _NOTE  # root mean square: alike for all, or attention would prefer the smaller
_NUM_FAST = 9  # rotary pairs that tell distances; those behind them compare contents at any distance
_FARTHEST = 600  # tokens over which distances are told
# Usual size of the constant's coordinate when a layer reads it, by layer: the stream grows, and it with it.
_CONSTANT_READ = (4.4, 3.0, 2.6, 2.4, 2.3, 2.0)
_NOTHING_READ = 16.0  # of the coordinate that only the tokens have which stand for "nothing"


@torch.no_grad()
def begin_quoting(model: LlamaForCausalLM, traits: TokenTraits) -> None:
    """Write circuits that copy, and that find the sentence in which a question's words stand.

    Layer by layer: 0 notes the three tokens before and where sentences begin; 1, in each token, the first
    three tokens of its sentence; 2 finds where the token stood before, and brings what was noted there of its
    sentence, or nothing; 3 gathers what the rare ones of the last few dozen tokens found; 4, where an answer
    begins, attends to the first, second and third token of the sentence found, and says them; 5 goes on as
    the text went on where the last three tokens stood before. A model that has only been made begins
    the right sentence for two of three questions. All other heads and layers begin with writing nothing.

    Args:
        model: Just made; with other sizes than the embedded model's it gets :func:`begin_copying` instead.
        traits: What the circuits must know of the tokens.
    """
    if not _fits(model):
        begin_copying(model)
        return
    _write_embeddings(model.model.embed_tokens.weight, traits)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight.copy_(model.model.embed_tokens.weight * (_USUAL_NOTE / _NOTE))
    layers = [layer.self_attn for layer in model.model.layers]
    base = float(dict(model.config.rope_parameters or {})["rope_theta"])
    turns = [base ** (-2 * pair / _HEAD_SIZE) for pair in range(_HEAD_SIZE // 2)]  # radians a position
    _write_notes(layers[0], turns)
    _write_sentences(layers[1], turns)
    _write_words(layers[2], turns)
    _write_votes(layers[3], turns)
    _write_quotation(layers[4])
    _write_induction(layers[5])


_HALF = _HEAD_SIZE // 2
_SLOW = range(_NUM_FAST, _HALF)
# Rows of queries and keys whose products hardly depend on the distance: both coordinates of each slow pair.
_STILL = (*_SLOW, *(pair + _HALF for pair in _SLOW))
# The same without the two slowest pairs, left to flags: alone in its pair, a flag is mixed with nothing.
_STILL_BUT_TWO = (*_SLOW[:-2], *(pair + _HALF for pair in _SLOW[:-2]))
_FLAG_ROWS = (_NUM_FAST - 1, _HALF - 2, _NUM_FAST - 2, _HALF - 1)


_HEADS_WRITTEN = ((0, (0, 1, 2)), (1, (1, 2, 3)), (2, (2,)), (3, (0,)), (4, (0, 1)), (5, (0, 1)))


def circuit_weights(model: LlamaForCausalLM) -> list[Tensor]:
    """Views of the heads that :func:`begin_quoting` writes; empty for a model too small for them."""
    if not _fits(model):
        return []
    views = []
    for layer, heads in _HEADS_WRITTEN:
        attention = model.model.layers[layer].self_attn
        for head in heads:
            rows = slice(head * _HEAD_SIZE, (head + 1) * _HEAD_SIZE)
            views += [part.weight[rows] for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
            views.append(attention.o_proj.weight[:, rows])
    return views


def _fits(model: LlamaForCausalLM) -> bool:
    config = model.config
    sizes = config.hidden_size, config.hidden_size // config.num_attention_heads
    return sizes == (_HIDDEN_SIZE, _HEAD_SIZE) and config.num_hidden_layers >= _NUM_LAYERS


class _Head:
    """One head, emptied, to be written into: what it compares, how it minds distance, what it carries."""

    def __init__(self, attention: Any, number: int) -> None:
        self._attention = attention
        self._first = self._next_value = _clear(attention, number, _HEAD_SIZE)

    def compare(
        self, rows: Sequence[int], query: Sequence[int], key: Sequence[int], gains: tuple[float, float]
    ) -> None:
        """Add the product of the query's coordinates and the key's to the attention."""
        at = self._first + torch.tensor(rows)
        self._attention.q_proj.weight[at, torch.tensor(query)] = gains[0]
        self._attention.k_proj.weight[at, torch.tensor(key)] = gains[1]

    def prefer(self, row: int, query: int, key: int, gain: float) -> None:
        """Add ``gain`` times one coordinate of the query times one of the key; of the same key several."""
        self._attention.q_proj.weight[self._first + row, query] = 1.0
        self._attention.k_proj.weight[self._first + row, key] = gain * _HEAD_SIZE**0.5

    def mind_distance(self, curve: tuple[Tensor, Tensor], key: int, gain: float) -> None:
        """Add a curve of the distance (see :func:`_curve`) times a coordinate of the key."""
        rows = self._first + torch.arange(_NUM_FAST)
        self._attention.q_proj.weight[rows, _CONSTANT_AT] = 1.0
        self._attention.k_proj.weight[rows, key] = curve[0] * gain * _HEAD_SIZE**0.5
        self._attention.k_proj.weight[rows + _HALF, key] = curve[1] * gain * _HEAD_SIZE**0.5

    def carry(self, source: Sequence[int], target: Sequence[int], gains: tuple[float, float]) -> None:
        """Write coordinates of what is attended to into the stream."""
        rows = self._next_value + torch.arange(len(source))
        self._next_value += len(source)
        self._attention.v_proj.weight[rows, torch.tensor(source)] = gains[0]
        self._attention.o_proj.weight[torch.tensor(target), rows] = gains[1]


def _curve(turns: Sequence[float], wanted: Tensor, weight: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Coefficients of the fast pairs' cosines and sines whose sum is near ``wanted``, by distance."""
    angles = torch.arange(len(wanted), dtype=torch.double)[:, None] * torch.tensor(turns[:_NUM_FAST])
    waves = torch.cat([angles.cos(), angles.sin()], dim=1)
    weighted = waves.T * weight.double()
    normal = weighted @ waves + ridge * weight.double().sum() * torch.eye(2 * _NUM_FAST, dtype=torch.double)
    solved = torch.linalg.solve(normal, weighted @ wanted.double()).float()
    return solved[:_NUM_FAST], solved[_NUM_FAST:]


def _write_embeddings(embedding: Tensor, traits: TokenTraits) -> None:
    embedding.normal_(0.0, 0.2 * _NOTE)
    embedding[:, _OWN] = _CODE * torch.randn_like(embedding[:, _OWN]).sign()
    words = torch.tensor(traits.words)
    codes = _CODE * torch.randn(int(words.max()) + 1, _WORD.stop - _WORD.start).sign()
    embedding[:, _WORD] = torch.where(words[:, None] >= 0, codes[words.clamp(min=0)], 0.0)
    embedding[:, _OF_FOUND[-1].stop :] = 0.0
    for place, values in (
        (_RARITY_AT, traits.rarity),
        (_LAYOUT_AT, traits.layout),
        (_PLACE_AT[0], traits.beginning),
        (_ENDS_AT, traits.ends),
    ):
        embedding[:, place] = _FLAG * torch.tensor(values)
    embedding[:, _CONSTANT_AT] = _FLAG
    unique = embedding[:, _UNIQUE]
    others = embedding.square().sum(-1) - unique.square().sum(-1)
    left = (_HIDDEN_SIZE * _EMBEDDING_NORM**2 - others).clamp(min=0.1 * _HIDDEN_SIZE * _EMBEDDING_NORM**2)
    unique *= (left / unique.square().sum(-1)).sqrt()[:, None]
    embedding[list(traits.nothing)] = 0.0
    embedding[list(traits.nothing), _NOTHING_AT] = _HIDDEN_SIZE**0.5 * _EMBEDDING_NORM


def _coordinates(part: slice, count: int | None = None, start: int = 0) -> list[int]:
    return list(range(part.start, part.stop))[start:][:count]


def _write_notes(attention: Any, turns: Sequence[float]) -> None:
    own = _coordinates(_OWN)
    for number, note in enumerate(_BEFORE):  # attends so many positions back
        head = _Head(attention, number)
        angles = [(number + 1) * turn for turn in turns[:_NUM_FAST]]
        curve = torch.tensor(angles).cos(), torch.tensor(angles).sin()
        head.mind_distance(curve, _CONSTANT_AT, 2.5**2 / _HEAD_SIZE**0.5)
        places = _coordinates(note)
        head.carry(own[: len(places)], places, (0.3, _NOTE / 0.3))
        # Behind an end something begins, unless what stands there is layout: a bracket, a dash, a line's end.
        head.carry([_ENDS_AT], [_PLACE_AT[number]], (0.3, _NOTE / 0.3))
        if number + 1 < len(_PLACE_AT):
            head.carry([_LAYOUT_AT], [_PLACE_AT[number + 1]], (0.3, -_NOTE / 0.3))


def _write_sentences(attention: Any, turns: Sequence[float]) -> None:
    distances = torch.arange(_FARTHEST)
    falling = _curve(turns, (-distances / 40).exp(), (-distances / 100).exp(), 1e-3)
    for number, note in enumerate(_OF_SENTENCE):  # the last token at that place of a sentence
        head = _Head(attention, number + 1)
        head.mind_distance(falling, _PLACE_AT[number], 9.0 / _CONSTANT_READ[1])
        places = _coordinates(note)
        head.carry(_coordinates(_OWN, len(places)), places, (0.3, _NOTE / 0.3))


def _write_words(attention: Any, turns: Sequence[float]) -> None:
    head, constant = _Head(attention, 2), _CONSTANT_READ[2]
    rows = [row for row in _STILL if row % _HALF != _HALF - 1]
    word = _coordinates(_WORD)
    head.compare(rows[: len(word)], word, word, (4.3, 4.3))
    # The token itself is no earlier place: what is near is worth less.
    near = torch.zeros(_FARTHEST)
    near[0] = -1.0
    weight = torch.ones(_FARTHEST)
    weight[0], weight[1:8], weight[12:80] = 1000.0, 0.0, 4.0
    head.mind_distance(_curve(turns, near, weight, 1e-5), _CONSTANT_AT, 30.0 / constant**2)
    head.prefer(_HALF - 1, _CONSTANT_AT, _NOTHING_AT, 50.0 / constant / _NOTHING_READ)
    for noted, found in zip(_OF_SENTENCE, _OF_FOUND, strict=True):
        head.carry(_coordinates(noted), _coordinates(found), (0.5, 2.4 * _NOTE))
    head.carry([_CONSTANT_AT], [_FOUND_AT], (0.3, _NOTE / 0.3))


def _write_votes(attention: Any, turns: Sequence[float]) -> None:
    head, constant = _Head(attention, 0), _CONSTANT_READ[3]
    distances = torch.arange(_FARTHEST)
    recent = _curve(turns, ((36 - distances) / 6).sigmoid(), (-distances / 200).exp(), 1e-3)
    head.mind_distance(recent, _CONSTANT_AT, 16.0 / constant**2)
    row = _HALF - 1
    head.prefer(row, _CONSTANT_AT, _NOTHING_AT, 29.0 / constant / _NOTHING_READ)
    head.prefer(row, _CONSTANT_AT, _FOUND_AT, 18.0 / constant**2)
    head.prefer(row, _CONSTANT_AT, _RARITY_AT, 18.0 / constant**2)
    for found in _OF_FOUND:
        places = _coordinates(found)
        head.carry(places, places, (0.5, 3.2 * _NOTE))


def _write_quotation(attention: Any) -> None:
    constant = _CONSTANT_READ[4]
    # Its first token tells most of a sentence: there the notes on the others are of the sentence before.
    compared, weights = (24, 12, 6), (3.0, 1.5, 1.4)
    places = (_ENDS_AT, *_PLACE_AT)  # after an end the first token, after the first the second
    for number in range(2):
        head, first = _Head(attention, number), 0
        for count, weight, found, noted in zip(compared, weights, _OF_FOUND, _OF_SENTENCE, strict=True):
            gain = (18.0 * weight) ** 0.5 / 3
            rows = _STILL_BUT_TWO[first : first + count]
            head.compare(rows, _coordinates(found, count), _coordinates(noted, count), (gain, gain))
            first += count
        for row, present, next_place in zip(_FLAG_ROWS, places, _PLACE_AT, strict=False):
            head.prefer(row, present, next_place, 25.0 / constant**2)
        head.prefer(_FLAG_ROWS[-1], _CONSTANT_AT, _NOTHING_AT, 50.0 / constant / _NOTHING_READ)
        half_of_own = _coordinates(_OWN, _HEAD_SIZE, 32 * number)
        head.carry(half_of_own, half_of_own, (0.5, 16 * _NOTE))


def _write_induction(attention: Any) -> None:
    block = 12
    compared = [_OWN, *_BEFORE]  # each with the note of the one before it
    for number in range(2):
        head = _Head(attention, number)
        for place, gain in enumerate(_MATCH_GAINS):
            start = (place + number) % 2 * block if place < 2 else 0
            rows = _STILL[place * block : (place + 1) * block]
            query = _coordinates(compared[place], block, start)
            key = _coordinates(compared[place + 1], block, start)
            head.compare(rows[: len(key)], query[: len(key)], key, (gain, gain))
        half_of_own = _coordinates(_OWN, _HEAD_SIZE, 32 * number)
        head.carry(half_of_own, half_of_own, (0.5, 10 * _NOTE))


def _clear(attention: Any, head: int, size: int) -> int:
    """Empty a head; returns its first row."""
    rows = slice(head * size, (head + 1) * size)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    return head * size


__all__ = ["begin_copying", "begin_quoting", "circuit_weights"]
