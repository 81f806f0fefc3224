"""Initial weights of small models: random, except for two layers that start as an induction pair.

Copying relies on induction heads: a head that attends to the previous token, and a head in a higher layer
that finds an earlier occurrence of the current token and copies what followed it (Olsson and others,
"In-context Learning and Induction Heads", 2022). From random weights a model learns them late, and until then
it learns nothing that requires copying. Here they exist from the first step, and training adapts them: the
same idea as the mimetic initialization of Trockman and Kolter (2023), with the parts written out.

Knows the layout of ``transformers``' Llama: heads lie side by side in the rows of the projections, and the
rotary embedding rotates coordinate ``i`` of a head together with coordinate ``i + head_size / 2``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

_EMBEDDING_SCALE = 0.05
_CONSTANT = 3.0  # last coordinate of every token's embedding, in units of the others
_NUM_FAST_PAIRS = 3  # pairs of rotary coordinates that tell neighbouring positions apart
_SLOWEST_TURN = 4e-3  # radians per position: slower pairs compare contents over hundreds of positions
_NUM_BEFORE = 3  # previous tokens that are compared
_NEIGHBOUR_GAIN, _MATCH_GAINS = 3.6, (3.0, 2.2, 1.8)


@torch.no_grad()
def begin_copying(model: LlamaForCausalLM) -> None:
    """Write the induction pair into a new model; its other weights stay random.

    In the lower layer, one head for each of the last three tokens notes which token it was. In the upper
    layer, two heads look for the position that follows the same tokens, the most recent weighted highest, and
    copy the token at that position.

    Args:
        model: Needs two layers, four heads and room for the notes; a smaller model is left unchanged.
    """
    config = model.config
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    half = size // 2
    base = float(dict(model.config.rope_parameters or {})["rope_theta"])
    turns = [base ** (-pair / half) for pair in range(half)]  # radians per position
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

    for head, note in enumerate(notes):  # attends head + 1 positions back
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
    model.lm_head.weight.copy_(embedding)  # the copied token is predicted; no change if the head is tied


def _clear(attention: Any, head: int, size: int) -> int:
    """Set a head's weights to zero; returns its first row."""
    rows = slice(head * size, (head + 1) * size)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    return head * size


__all__ = ["begin_copying"]
