"""The embedded model's circuits: written into its initial weights, and held while the rest is trained.

From random weights a model this small finds such circuits late or never. Here they are there from the first
step, in heads and in coordinates of the residual stream of their own. Training reads what they write, and
writes beside it; the circuits themselves it only tunes. The same idea as mimetic initialization (Trockman and
Kolter, 2023), with more parts written down.

Knows which weights are the circuits'. What they do is in :mod:`~local_backend.embedded.quoting`
and :mod:`~local_backend.embedded.editing`.
"""

from __future__ import annotations

from operator import add

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from local_backend.embedded.editing import HEADS_OF_EDITING, BetweenPoints, write_editing
from local_backend.embedded.quoting import HEADS_OF_QUOTING, write_quoting
from local_backend.embedded.stream import (
    ADDS_AT,
    BALLAST,
    BALLAST_AT,
    CODE,
    CONSTANT_AT,
    CUE_AT,
    CUED_AT,
    EMBEDDING_NORM,
    ENDS_AT,
    FLAG,
    FREE,
    HEAD_SIZE,
    HIDDEN_SIZE,
    MATCHED,
    NOTHING_AT,
    NUM_HEADS,
    NUM_LAYERS,
    OPENING_AT,
    OWN,
    PLACE_AT,
    RARITY_AT,
    READ,
    READ_UNTIL,
    SHORTENED_AT,
    SHORTENS_AT,
    UNIQUE,
    WORD,
)
from local_backend.embedded.tokenization import TokenTraits

NUM_WRITTEN_HEADS = tuple(map(add, HEADS_OF_QUOTING, HEADS_OF_EDITING))  # of each layer
_FREE_CODE = 0.1  # of the coordinates left to training, at random
_ASSOCIATED = 0.5  # of a topic's coordinate, for a token that only this topic has
_SAID_FIRST = 1.0  # what the output head adds to tokens a quotation can begin with
_NUM_UNLIKE = 3  # signs by which the code of a reply's beginning differs from that of a line's
_HEAD_SHARE = 0.125  # the output head begins with so much of the embeddings


@torch.no_grad()
def begin_with_circuits(model: LlamaForCausalLM, traits: TokenTraits) -> None:
    """Write all circuits; the other heads and layers begin with writing nothing.

    Args:
        model: Just made, of the sizes that :func:`fits` asks for.
        traits: What the circuits must know of the tokens.
    """
    _write_embeddings(model.model.embed_tokens.weight, traits)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _write_norm(norm.weight)
    _write_norm(model.model.norm.weight)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight * _HEAD_SHARE)
    model.lm_head.weight[:, OWN.stop :] = 0.0
    model.lm_head.weight[:, CUED_AT[0]] = _SAID_FIRST * torch.tensor(traits.said_first)
    layers = [layer.self_attn for layer in model.model.layers]
    base = float(dict(model.config.rope_parameters or {})["rope_theta"])
    turns = [base ** (-2 * pair / HEAD_SIZE) for pair in range(HEAD_SIZE // 2)]  # radians a position
    write_quoting(layers, turns)
    words = model.model.embed_tokens.weight[:, WORD]
    between = BetweenPoints(paragraph=words[traits.paragraph], digits=words[list(traits.digits)])
    write_editing(layers, turns, HEADS_OF_QUOTING, between)


def fits(model: LlamaForCausalLM) -> bool:
    """Whether a model has the sizes the circuits are written for."""
    config = model.config
    sizes = config.hidden_size, config.num_attention_heads, config.head_dim, config.num_hidden_layers
    return bool(sizes == (HIDDEN_SIZE, NUM_HEADS, HEAD_SIZE, NUM_LAYERS))


def held_weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Masks, by parameter, of the weights that belong to the circuits: their heads, and their coordinates.

    What is written into a coordinate is theirs as long as one of their layers above still reads it.
    """
    masks = {}
    for number, (layer, num_heads) in enumerate(zip(model.model.layers, NUM_WRITTEN_HEADS, strict=True)):
        coordinates = torch.zeros(HIDDEN_SIZE, dtype=torch.bool)
        for part, last_reader in READ_UNTIL:
            coordinates[part] = last_reader > number
        heads = torch.arange(NUM_HEADS * HEAD_SIZE) < num_heads * HEAD_SIZE
        attention = layer.self_attn
        held = {
            attention.q_proj: heads[:, None],
            attention.k_proj: heads[:, None],
            attention.v_proj: heads[:, None],
            attention.o_proj: heads | coordinates[:, None],
            layer.mlp.down_proj: coordinates[:, None],
            layer.input_layernorm: torch.arange(HIDDEN_SIZE) < FREE.start,
        }
        for module, mask in held.items():
            masks[_name_of(model, module.weight)] = mask.expand_as(module.weight)
    embedding, head, norm = model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight
    masks[_name_of(model, embedding)] = (torch.arange(HIDDEN_SIZE) < FREE.start).expand_as(embedding)
    # What is copied is said by the codes it was read by.
    says = torch.arange(HIDDEN_SIZE) < OWN.stop
    says[CUED_AT[0]] = True
    masks[_name_of(model, head)], masks[_name_of(model, norm)] = says.expand_as(head), says
    return masks


def circuit_weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Masks, by parameter, of the weights written into the circuits, and how much each token tells."""
    masks = {}
    for layer, num_heads in zip(model.model.layers, NUM_WRITTEN_HEADS, strict=True):
        heads = torch.arange(NUM_HEADS * HEAD_SIZE) < num_heads * HEAD_SIZE
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            masks[_name_of(model, projection.weight)] = heads[:, None] & (projection.weight != 0)
        masks[_name_of(model, attention.o_proj.weight)] = heads & (attention.o_proj.weight != 0)
    embedding = model.model.embed_tokens.weight
    columns = torch.zeros(HIDDEN_SIZE, dtype=torch.bool)
    columns[WORD] = columns[RARITY_AT] = True
    masks[_name_of(model, embedding)] = columns & (embedding != 0)
    return masks


def _name_of(model: LlamaForCausalLM, wanted: Tensor) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter is wanted)


def _codes_far_apart() -> Tensor:
    """Sixteen codes of eight signs, any two of which differ in four signs or more."""
    signs = torch.ones(1, 1)
    for _ in range(3):  # Sylvester's construction of Hadamard matrices, doubled to MATCHED[2] signs
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return torch.cat([signs, -signs])


def _write_norm(weight: Tensor) -> None:
    usual = (BALLAST**2 / HIDDEN_SIZE + 0.4**2) ** 0.5  # length of the stream, as a root mean square
    weight.fill_(READ * usual)
    weight[BALLAST_AT] = 0.0


def _write_embeddings(embedding: Tensor, traits: TokenTraits) -> None:
    embedding.zero_()
    embedding[:, FREE].normal_(0.0, _FREE_CODE)
    associated = _ASSOCIATED * torch.tensor(traits.topics)[:, :HEAD_SIZE]
    embedding[:, FREE.start : FREE.start + associated.shape[1]] = associated
    embedding[:, OWN] = CODE * torch.randn_like(embedding[:, OWN]).sign()
    words = torch.tensor(traits.words)
    codes = CODE * torch.randn(int(words.max()) + 1, WORD.stop - WORD.start).sign()
    # Points are told apart by one digit, two tokens back, of which few coordinates are compared.
    codes[words[list(traits.digits)], : MATCHED[2]] = CODE * _codes_far_apart()[: len(traits.digits)]
    # Three tokens back a reply's beginning is nearly as good as a line's: a list goes on in the reply. Were
    # it quite as good, a list given as an example would be copied too.
    alike = torch.tensor([-1.0] * _NUM_UNLIKE + [1.0] * (MATCHED[2] - _NUM_UNLIKE))
    codes[words[traits.reply], : MATCHED[2]] = alike * codes[words[traits.line], : MATCHED[2]]
    embedding[:, WORD] = codes[words]
    for place, values in (
        (RARITY_AT, traits.rarity),
        (PLACE_AT[0], traits.beginning),
        (ENDS_AT, traits.ends),
    ):
        embedding[:, place] = FLAG * torch.tensor(values)
    embedding[traits.cue, CUE_AT] = FLAG
    for tokens, place in (
        (traits.adds, ADDS_AT),
        (traits.shortens, SHORTENS_AT),
        ([traits.end], SHORTENED_AT),
        ([traits.opening], OPENING_AT),
    ):
        embedding[list(tokens), place] = FLAG
    embedding[:, CONSTANT_AT] = FLAG
    unique = embedding[:, UNIQUE]
    others = embedding.square().sum(-1) - unique.square().sum(-1)
    left = (HIDDEN_SIZE * EMBEDDING_NORM**2 - others).clamp(min=0.1 * HIDDEN_SIZE * EMBEDDING_NORM**2)
    unique *= (left / unique.square().sum(-1)).sqrt()[:, None]
    embedding[list(traits.nothing)] = 0.0
    embedding[list(traits.nothing), NOTHING_AT] = HIDDEN_SIZE**0.5 * EMBEDDING_NORM
    embedding[:, BALLAST_AT] = BALLAST


__all__ = ["begin_with_circuits", "circuit_weights", "fits", "held_weights"]
