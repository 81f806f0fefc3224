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
# the sentence where it stood before; at last single coordinates: whether the token one, two before ends a
# sentence, whether this one does, and a constant.
_HIDDEN_SIZE, _HEAD_SIZE, _NUM_LAYERS = 256, 64, 4
_OWN = slice(0, 96)
_BEFORE = (slice(96, 120), slice(120, 144), slice(144, 156))
_OF_SENTENCE = (slice(156, 180), slice(180, 204))
_OF_FOUND = (slice(204, 228), slice(228, 252))
_ENDED_BEFORE = (252, 253)
_ENDS, _CONSTANT_AT = 254, 255
_CODE = 24  # coordinates that tell a token in a note
_RANDOM_SHARE = 0.3  # of what the random heads and layers write, so that the circuits are heard


@torch.no_grad()
def begin_quoting(model: LlamaForCausalLM, ending_token_ids: Sequence[int]) -> None:
    """Write circuits that copy, and that find the sentence in which a question's words stand.

    Layer 0 notes the tokens before and whether they end a sentence; layer 1 the first two tokens of the
    present sentence; layer 2 holds the two heads that copy and one that finds where the present token stood
    before, and brings what was noted there of its sentence; layer 3 gathers what the last few dozen tokens
    found: rare words agree on one sentence, frequent ones on none.

    Args:
        model: Just made; with other sizes than the embedded model's it gets :func:`begin_copying` instead.
        ending_token_ids: Tokens behind which a sentence, a line or a message begins.
    """
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    if (config.hidden_size, size) != (_HIDDEN_SIZE, _HEAD_SIZE) or config.num_hidden_layers < _NUM_LAYERS:
        begin_copying(model)
        return
    half = size // 2
    base = float(dict(config.rope_parameters or {})["rope_theta"])
    turns = [base ** (-pair / half) for pair in range(half)]  # radians a position
    slow = torch.tensor([pair for pair, turn in enumerate(turns) if turn < _SLOWEST_TURN])
    still = torch.cat([slow, slow + half])  # coordinates of a head that compare contents at any distance
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, _EMBEDDING_SCALE)
    embedding[:, _OWN.stop :] *= 0.2
    embedding[:, _ENDS] = 0.0
    embedding[list(ending_token_ids), _ENDS] = _CONSTANT * _EMBEDDING_SCALE
    embedding[:, _CONSTANT_AT] = _CONSTANT * _EMBEDDING_SCALE
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= _RANDOM_SHARE
        layer.mlp.down_proj.weight *= _RANDOM_SHARE
    notes, sentences, words, votes = (layer.self_attn for layer in model.model.layers[:_NUM_LAYERS])
    code, all_code = torch.arange(_CODE), torch.arange(size)

    for head, note in enumerate(_BEFORE):  # attends so many positions back
        first = _clear(notes, head, size)
        for pair in range(_NUM_FAST_PAIRS):
            angle = torch.tensor((head + 1) * turns[pair])
            notes.q_proj.weight[first + pair, _CONSTANT_AT] = 3.0
            notes.k_proj.weight[first + pair, _CONSTANT_AT] = 3.0 * angle.cos()
            notes.k_proj.weight[first + pair + half, _CONSTANT_AT] = 3.0 * angle.sin()
        places = torch.arange(note.start, note.stop)
        rows = first + torch.arange(len(places))
        notes.v_proj.weight[rows, torch.arange(len(places))] = 0.3
        notes.o_proj.weight[places, rows] = _EMBEDDING_SCALE / 0.3
        if head < len(_ENDED_BEFORE):
            notes.v_proj.weight[first + _CODE, _ENDS] = 0.3
            notes.o_proj.weight[_ENDED_BEFORE[head], first + _CODE] = _EMBEDDING_SCALE / 0.3

    for head, (ended, note) in enumerate(zip(_ENDED_BEFORE, _OF_SENTENCE, strict=True), 2):
        first = _clear(sentences, head, size)  # attends to the last position behind an end
        for pair in (6, 7, 8, 9):  # together they fall with the distance, over a sentence's length
            sentences.q_proj.weight[first + pair, _CONSTANT_AT] = 2.2
            sentences.k_proj.weight[first + pair, ended] = 2.2
        sentences.q_proj.weight[first + 25, _CONSTANT_AT] = 3.0
        sentences.k_proj.weight[first + 25, ended] = 3.0
        sentences.v_proj.weight[first + code, code] = 0.3
        sentences.o_proj.weight[note.start + code, first + code] = 0.25

    block = _CODE // 2
    compared = [_OWN, *_BEFORE]  # each with the note of the one before it
    for head in range(2):
        first = _clear(words, head, size)
        for number, gain in enumerate(_MATCH_GAINS):
            rows = first + still[number * block : (number + 1) * block]
            part = torch.arange(block) + ((number + head) % 2 * block if number < 2 else 0)
            words.q_proj.weight[rows, compared[number].start + part] = gain
            words.k_proj.weight[rows, compared[number + 1].start + part] = gain
        written = all_code + 32 * head
        words.v_proj.weight[first + all_code, written] = 0.5
        words.o_proj.weight[written, first + all_code] = 10 * _EMBEDDING_SCALE

    first = _clear(words, 2, size)  # attends to where the present token stood before, not to itself
    same = 20 + torch.arange(len(still))
    words.q_proj.weight[first + still, same] = 4.0
    words.k_proj.weight[first + still, same] = 4.0
    for pair in (5, 6, 7, 8):
        words.q_proj.weight[first + pair, _CONSTANT_AT] = 2.0
        words.k_proj.weight[first + pair, _CONSTANT_AT] = -2.0
    for number, (noted, found) in enumerate(zip(_OF_SENTENCE, _OF_FOUND, strict=True)):
        rows = first + number * _CODE + code
        words.v_proj.weight[rows, noted.start + code] = 0.5
        words.o_proj.weight[found.start + code, rows] = 0.24

    for head, (found, gathered) in enumerate(((_OF_FOUND[0], _OWN), (_OF_FOUND[1], _OF_FOUND[1]))):
        first = _clear(votes, head, size)  # attends to the last few dozen tokens alike
        for pair in (8, 9):
            votes.q_proj.weight[first + pair, _CONSTANT_AT] = 7.0
            votes.k_proj.weight[first + pair, _CONSTANT_AT] = 7.0
        votes.v_proj.weight[first + code, found.start + code] = 0.5
        votes.o_proj.weight[gathered.start + code, first + code] = 3.0


def _clear(attention: Any, head: int, size: int) -> int:
    """Empty a head; returns its first row."""
    rows = slice(head * size, (head + 1) * size)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    return head * size


__all__ = ["begin_copying", "begin_quoting"]
