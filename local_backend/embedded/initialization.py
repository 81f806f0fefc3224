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
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

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
    base = float(dict(config.rope_parameters or {})["rope_theta"])
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


# begin_quoting: the residual stream's coordinates, for a hidden size of 256. First a token's own, then notes
# on the tokens one, two and three before it, on the first and second token of its sentence, and on those of
# the sentence where it stood before; at last single coordinates: how rare the token is, whether the one and
# the two before end a sentence, whether it does itself, and a constant.
_HIDDEN_SIZE, _HEAD_SIZE, _NUM_LAYERS = 256, 64, 4
_OWN = slice(0, 96)
_BEFORE = (slice(96, 120), slice(120, 144), slice(144, 156))
_OF_SENTENCE = (slice(156, 179), slice(179, 202))
_OF_FOUND = (slice(202, 225), slice(225, 248))
_RARITY_AT, _ENDED_BEFORE, _ENDS_AT, _CONSTANT_AT = 248, (252, 253), 254, 255
_CODE = 24  # coordinates that tell a token in a note on those before
_RANDOM_SHARE = 0.3  # of what the random heads and layers write, so that the circuits are heard
_EMBEDDING_NORM = 0.034  # root mean square: alike for all, or attention would prefer the smaller


@torch.no_grad()
def begin_quoting(
    model: LlamaForCausalLM, ending_token_ids: Sequence[int], rarity: Sequence[float] | Tensor
) -> None:
    """Write circuits that copy, and that find the sentence in which a question's words stand.

    Layer 0 notes the tokens before and whether they end a sentence; layer 1 the first two tokens of the
    present sentence; layer 2 holds the two heads that copy and one that finds where the present token stood
    before, and brings what was noted there of its sentence; layer 3 gathers what the last few dozen tokens
    found, and listens to the rare ones.

    Args:
        model: Just made; with other sizes than the embedded model's it gets :func:`begin_copying` instead.
        ending_token_ids: Tokens behind which a sentence, a line or a message begins.
        rarity: Of each token, from 0 for what stands everywhere to 1.
    """
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    if (config.hidden_size, size) != (_HIDDEN_SIZE, _HEAD_SIZE) or config.num_hidden_layers < _NUM_LAYERS:
        begin_copying(model)
        return
    _write_embeddings(model.model.embed_tokens.weight, ending_token_ids, torch.as_tensor(rarity))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= _RANDOM_SHARE
        layer.mlp.down_proj.weight *= _RANDOM_SHARE
    half = size // 2
    base = float(dict(config.rope_parameters or {})["rope_theta"])
    turns = [base ** (-pair / half) for pair in range(half)]  # radians a position
    _write_notes(model, turns)
    _write_sentences(model, turns)
    _write_words(model, turns)
    _write_votes(model, turns)


def _write_embeddings(embedding: Tensor, ending_token_ids: Sequence[int], rarity: Tensor) -> None:
    embedding.normal_(0.0, _EMBEDDING_SCALE)
    embedding[:, _OWN.stop :] *= 0.2
    embedding[:, _ENDS_AT] = 0.0
    embedding[list(ending_token_ids), _ENDS_AT] = _CONSTANT * _EMBEDDING_SCALE
    embedding[:, _CONSTANT_AT] = _CONSTANT * _EMBEDDING_SCALE
    embedding[:, _RARITY_AT] = rarity * 1.5 * _EMBEDDING_SCALE
    left = embedding.shape[1] * _EMBEDDING_NORM**2 - embedding[:, _OWN.stop :].square().sum(-1)
    own = embedding[:, _OWN]
    own *= (left.clamp(min=0.05) / own.square().sum(-1)).sqrt()[:, None]


def _write_notes(model: LlamaForCausalLM, turns: Sequence[float]) -> None:
    layer, size, half = model.model.layers[0].self_attn, _HEAD_SIZE, _HEAD_SIZE // 2
    for head, note in enumerate(_BEFORE):  # attends so many positions back
        first = _clear(layer, head, size)
        for pair in range(10):  # fewer meet again far away
            angle = torch.tensor((head + 1) * turns[pair])
            layer.q_proj.weight[first + pair, _CONSTANT_AT] = 2.5
            layer.k_proj.weight[first + pair, _CONSTANT_AT] = 2.5 * angle.cos()
            layer.k_proj.weight[first + pair + half, _CONSTANT_AT] = 2.5 * angle.sin()
        places = torch.arange(note.start, note.stop)
        own = torch.arange(len(places))
        layer.v_proj.weight[first + own, own] = 0.3
        layer.o_proj.weight[places, first + own] = _EMBEDDING_SCALE / 0.3
        if head < len(_ENDED_BEFORE):
            layer.v_proj.weight[first + _CODE, _ENDS_AT] = 0.3
            layer.o_proj.weight[_ENDED_BEFORE[head], first + _CODE] = _EMBEDDING_SCALE / 0.3


def _write_sentences(model: LlamaForCausalLM, turns: Sequence[float]) -> None:
    layer, size = model.model.layers[1].self_attn, _HEAD_SIZE
    falling = _pairs(turns, 0.015, 0.4)  # together they fall with the distance, over a sentence's length
    gain = 4.4 / len(falling) ** 0.5
    for head, (ended, note) in enumerate(zip(_ENDED_BEFORE, _OF_SENTENCE, strict=True), 2):
        first = _clear(layer, head, size)  # attends to the last position behind an end
        layer.q_proj.weight[[first + pair for pair in falling], _CONSTANT_AT] = gain
        layer.k_proj.weight[[first + pair for pair in falling], ended] = gain
        layer.q_proj.weight[first + len(turns) - 1, _CONSTANT_AT] = 3.0
        layer.k_proj.weight[first + len(turns) - 1, ended] = 3.0
        code = torch.arange(note.stop - note.start)
        layer.v_proj.weight[first + code, code] = 0.3
        layer.o_proj.weight[note.start + code, first + code] = 0.25


def _write_words(model: LlamaForCausalLM, turns: Sequence[float]) -> None:
    layer, size = model.model.layers[2].self_attn, _HEAD_SIZE
    slow = torch.tensor(_pairs(turns, 0.0, 5e-4))
    still = torch.cat([slow, slow + size // 2])  # coordinates that compare contents at any distance
    block = _CODE // 2
    compared = [_OWN, *_BEFORE]  # each with the note of the one before it
    for head in range(2):
        first = _clear(layer, head, size)
        for number, gain in enumerate(_MATCH_GAINS):
            rows = first + still[number * block : (number + 1) * block]
            part = torch.arange(len(rows)) + ((number + head) % 2 * block if number < 2 else 0)
            layer.q_proj.weight[rows, compared[number].start + part] = gain
            layer.k_proj.weight[rows, compared[number + 1].start + part] = gain
        rows, written = first + torch.arange(size), torch.arange(size) + 32 * head
        layer.v_proj.weight[rows, written] = 0.5
        layer.o_proj.weight[written, rows] = 10 * _EMBEDDING_SCALE

    first = _clear(layer, 2, size)  # attends to where the present token stood before, not to itself
    same = 20 + torch.arange(len(still))
    layer.q_proj.weight[first + still, same] = 4.0
    layer.k_proj.weight[first + still, same] = 4.0
    near = [first + pair for pair in _pairs(turns, 0.01, 0.5)]
    layer.q_proj.weight[near, _CONSTANT_AT] = 2.0
    layer.k_proj.weight[near, _CONSTANT_AT] = -2.0
    for noted, found in zip(_OF_SENTENCE, _OF_FOUND, strict=True):
        code = torch.arange(noted.stop - noted.start)
        rows = first + noted.start - _OF_SENTENCE[0].start + code
        layer.v_proj.weight[rows, noted.start + code] = 0.5
        layer.o_proj.weight[found.start + code, rows] = 0.24


def _write_votes(model: LlamaForCausalLM, turns: Sequence[float]) -> None:
    layer, size = model.model.layers[3].self_attn, _HEAD_SIZE
    recent = _pairs(turns, 0.012, 0.05)
    for head, (found, gathered) in enumerate(((_OF_FOUND[0], _OWN), (_OF_FOUND[1], _OF_FOUND[1]))):
        first = _clear(layer, head, size)  # attends to the last few dozen tokens, the rare ones above all
        layer.q_proj.weight[[first + pair for pair in recent], _CONSTANT_AT] = 7.0
        layer.k_proj.weight[[first + pair for pair in recent], _CONSTANT_AT] = 7.0
        layer.q_proj.weight[first + len(turns) - 1, _CONSTANT_AT] = 15.0
        layer.k_proj.weight[first + len(turns) - 1, _RARITY_AT] = 15.0
        code = torch.arange(found.stop - found.start)
        layer.v_proj.weight[first + code, found.start + code] = 0.5
        layer.o_proj.weight[gathered.start + code, first + code] = 3.0


def _pairs(turns: Sequence[float], above: float, below: float) -> list[int]:
    """Rotary pairs that turn by so many radians a position."""
    return [pair for pair, turn in enumerate(turns) if above < turn < below]


def _clear(attention: Any, head: int, size: int) -> int:
    """Empty a head; returns its first row."""
    rows = slice(head * size, (head + 1) * size)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    return head * size


__all__ = ["begin_copying", "begin_quoting"]
