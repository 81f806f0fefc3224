"""Circuits of the embedded model that find and copy a sentence, written into its initial weights and kept.

Answering from documents takes more than copying: a question's words must be found in the documents, and the
answer begins not there, but at the beginning of the sentence they stand in. From random weights a model this
small finds such circuits late or never. Here they are there from the first step, in heads and in coordinates
of the residual stream of their own. Training reads what they write, and writes beside it; the circuits
themselves it only tunes. The same idea as induction heads (Olsson and others, "In-context Learning and
Induction Heads", 2022) and mimetic initialization (Trockman and Kolter, 2023), with more parts written down.

Knows the layout of ``transformers``' Llama: heads stand side by side in the rows of the projections, and the
rotary embedding turns coordinate ``i`` of a head together with coordinate ``i + head_size / 2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from local_backend.embedded.tokenization import TokenTraits

# The residual stream's coordinates. First a token's own code, in which what stands from 20 to 58 is the same
# for a word in any case, behind a space or not; then notes on the five tokens before it; what tells the
# sentence it is in from others; the same of the sentence where its word stood before, which becomes that of
# the sentence to quote; at last single coordinates, and what is left to training.
_HIDDEN_SIZE, _NUM_HEADS, _HEAD_SIZE, _NUM_LAYERS = 380, 5, 64, 6
_OWN, _WORD, _UNIQUE = slice(0, 96), slice(20, 58), slice(58, 96)
_BEFORE = (slice(96, 134), slice(134, 158), slice(158, 170), slice(170, 178), slice(178, 186))
_OF_SENTENCE = slice(186, 228)
_OF_FOUND = slice(228, 270)
_RARITY_AT, _FOUND_AT, _NOTHING_AT, _ENDS_AT, _CUE_AT, _CONSTANT_AT = range(270, 276)
_PLACE_AT = (276, 277, 278)  # whether the token is the first, the second, the third of a sentence
_CUED_AT = (279, 280, 281)  # whether the first, the second, the third token of a quotation comes next
_BALLAST_AT = 282
_FREE = slice(283, _HIDDEN_SIZE)
# The last layer whose circuits read a coordinate.
_READ_UNTIL = (
    (_OWN, 5),
    (slice(_BEFORE[0].start, _BEFORE[2].stop), 5),
    (slice(_BEFORE[3].start, _BEFORE[4].stop), 1),
    (slice(_OF_SENTENCE.start, _BALLAST_AT), 5),
    (slice(_BALLAST_AT, _FREE.start), _NUM_LAYERS),
)
# A sentence is told from others by its first token and those from the second to the fifth before it: so many
# coordinates of each.
_TELLING = (8, 10, 8, 8, 8)
_CODE = 0.37  # of every coordinate of a token's own code, with a random sign
_FLAG = 1.2
_EMBEDDING_NORM = 0.27  # root mean square of an embedding without its ballast
# A coordinate of its own makes all tokens nearly equally long in every layer, whatever training writes beside
# the circuits: the norms then divide by a constant, and what was written is read at the scale it was meant.
_BALLAST = 40.0
_READ = 2.5  # what is read is so many times what was written
_FREE_CODE = 0.1  # of the coordinates left to training, at random
_ASSOCIATED = 0.5  # of a topic's coordinate, for a token that only this topic has
_CONSTANT_READ = _READ * _FLAG
_NOTHING_READ = _READ * _EMBEDDING_NORM * _HIDDEN_SIZE**0.5  # of the one coordinate of "nothing"
_NUM_FAST = 9  # rotary pairs that tell distances; those behind them compare contents at any distance
_FARTHEST = 600  # tokens over which distances are told
_MATCH_GAINS = (3.3, 2.4, 2.0)
_NOTED = 1.5  # how much a token counts in the notes on it
_HEAD_SHARE = 0.125  # the output head begins with so much of the embeddings


@torch.no_grad()
def begin_quoting(model: LlamaForCausalLM, traits: TokenTraits) -> None:
    """Write circuits that copy, and that find the sentence in which a question's words stand.

    Layer by layer: 0 notes the five tokens before and where sentences begin; 1, in each token, what tells its
    sentence from others, and to which topics the words shortly before it belong; 2 finds where the token's
    word stood before, and brings what was noted there of the sentence, or nothing; 3 gathers what the telling
    ones of the last few dozen tokens found; 4 keeps it while a quotation goes on; 5, where a reply announces
    a quotation, attends to the first, second and third token of the sentence found most, and says them, and
    it goes on as the text went on where the last three tokens stood before, first of all in that sentence. A
    model that has only been made begins the right sentence for about nine of ten questions. All other heads
    and layers begin with writing nothing.

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
    model.lm_head.weight[:, _OWN.stop :] = 0.0
    layers = [layer.self_attn for layer in model.model.layers]
    base = float(dict(model.config.rope_parameters or {})["rope_theta"])
    turns = [base ** (-2 * pair / _HEAD_SIZE) for pair in range(_HEAD_SIZE // 2)]  # radians a position
    _write_notes(layers[0], turns)
    _write_sentences(layers[1], turns)
    _write_topics(layers[1], turns)
    _write_words(layers[2], turns)
    _write_votes(layers[3], turns)
    _write_kept(layers[4], turns)
    _write_quotation(layers[5])
    _write_induction(layers[5])


_HALF = _HEAD_SIZE // 2
_SLOW = range(_NUM_FAST, _HALF)
# Rows of queries and keys whose products hardly depend on the distance: both coordinates of each slow pair.
_STILL = (*_SLOW, *(pair + _HALF for pair in _SLOW))
# The same without the two slowest pairs, left to flags: alone in its pair, a flag is mixed with nothing.
_STILL_BUT_TWO = (*_SLOW[:-2], *(pair + _HALF for pair in _SLOW[:-2]))
_FLAG_ROWS = (_NUM_FAST - 1, _HALF - 2, _NUM_FAST - 2, _HALF - 1)
_HEADS_WRITTEN = (len(_BEFORE), 2, 1, 1, 1, 4)  # of each layer, its first heads
POINTING_LAYER, POINTING_HEADS = 5, 2  # where a quotation's first tokens are attended to


def fits(model: LlamaForCausalLM) -> bool:
    """Whether a model has the sizes the circuits are written for."""
    config = model.config
    sizes = config.hidden_size, config.num_attention_heads, config.head_dim, config.num_hidden_layers
    return bool(sizes == (_HIDDEN_SIZE, _NUM_HEADS, _HEAD_SIZE, _NUM_LAYERS))


def held_weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Masks, by parameter, of the weights that belong to the circuits: their heads, and their coordinates.

    What is written into a coordinate is theirs as long as one of their layers above still reads it.
    """
    masks = {}
    for number, (layer, num_heads) in enumerate(zip(model.model.layers, _HEADS_WRITTEN, strict=True)):
        coordinates = torch.zeros(_HIDDEN_SIZE, dtype=torch.bool)
        for part, last_reader in _READ_UNTIL:
            coordinates[part] = last_reader > number
        heads = torch.arange(_NUM_HEADS * _HEAD_SIZE) < num_heads * _HEAD_SIZE
        attention = layer.self_attn
        held = {
            attention.q_proj: heads[:, None],
            attention.k_proj: heads[:, None],
            attention.v_proj: heads[:, None],
            attention.o_proj: heads | coordinates[:, None],
            layer.mlp.down_proj: coordinates[:, None],
            layer.input_layernorm: torch.arange(_HIDDEN_SIZE) < _FREE.start,
        }
        for module, mask in held.items():
            masks[_name_of(model, module.weight)] = mask.expand_as(module.weight)
    embedding, head, norm = model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight
    masks[_name_of(model, embedding)] = (torch.arange(_HIDDEN_SIZE) < _FREE.start).expand_as(embedding)
    # What is copied is said by the codes it was read by.
    says = torch.arange(_HIDDEN_SIZE) < _OWN.stop
    masks[_name_of(model, head)], masks[_name_of(model, norm)] = says.expand_as(head), says
    return masks


def circuit_weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Masks, by parameter, of the weights written into the circuits, and how much each token tells."""
    masks = {}
    for layer, num_heads in zip(model.model.layers, _HEADS_WRITTEN, strict=True):
        heads = torch.arange(_NUM_HEADS * _HEAD_SIZE) < num_heads * _HEAD_SIZE
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            masks[_name_of(model, projection.weight)] = heads[:, None] & (projection.weight != 0)
        masks[_name_of(model, attention.o_proj.weight)] = heads & (attention.o_proj.weight != 0)
    embedding = model.model.embed_tokens.weight
    columns = torch.zeros(_HIDDEN_SIZE, dtype=torch.bool)
    columns[_WORD] = columns[_RARITY_AT] = True
    masks[_name_of(model, embedding)] = columns & (embedding != 0)
    return masks


def _name_of(model: LlamaForCausalLM, wanted: Tensor) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter is wanted)


class _Head:
    """One head, emptied, to be written into: what it compares, how it minds distance, what it carries."""

    def __init__(self, attention: Any, number: int) -> None:
        self._attention = attention
        self._first = self._next_value = number * _HEAD_SIZE
        rows = slice(self._first, self._first + _HEAD_SIZE)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[rows] = 0.0
        attention.o_proj.weight[:, rows] = 0.0
        # Nothing attends to nothing, wherever it stands: it must not gather what was written of others.
        self.prefer(_HEAD_SIZE - 1, _NOTHING_AT, _NOTHING_AT, 0.3)

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

    def carry(self, source: Sequence[int], target: Sequence[int], factor: float) -> None:
        """Add ``factor`` times coordinates of what is attended to to other coordinates."""
        rows = self._next_value + torch.arange(len(source))
        self._next_value += len(source)
        self._attention.v_proj.weight[rows, torch.tensor(source)] = 1 / _READ
        self._attention.o_proj.weight[torch.tensor(target), rows] = factor


def _curve(turns: Sequence[float], wanted: Tensor, weight: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Coefficients of the fast pairs' cosines and sines whose sum is near ``wanted``, by distance."""
    angles = torch.arange(len(wanted), dtype=torch.double)[:, None] * torch.tensor(turns[:_NUM_FAST])
    waves = torch.cat([angles.cos(), angles.sin()], dim=1)
    weighted = waves.T * weight.double()
    normal = weighted @ waves + ridge * weight.double().sum() * torch.eye(2 * _NUM_FAST, dtype=torch.double)
    solved = torch.linalg.solve(normal, weighted @ wanted.double()).float()
    return solved[:_NUM_FAST], solved[_NUM_FAST:]


def _falling(turns: Sequence[float]) -> tuple[Tensor, Tensor]:
    """A curve that prefers the nearest."""
    distances = torch.arange(_FARTHEST)
    nearest = ((1 + 150 / 8) / (1 + distances / 8)).log().clamp(min=0.2) / 3
    return _curve(turns, nearest, 1 / (1 + distances / 5), 1e-5)


def _write_norm(weight: Tensor) -> None:
    usual = (_BALLAST**2 / _HIDDEN_SIZE + 0.4**2) ** 0.5  # length of the stream, as a root mean square
    weight.fill_(_READ * usual)
    weight[_BALLAST_AT] = 0.0


def _write_embeddings(embedding: Tensor, traits: TokenTraits) -> None:
    embedding.zero_()
    embedding[:, _FREE].normal_(0.0, _FREE_CODE)
    associated = _ASSOCIATED * torch.tensor(traits.topics)[:, :_HEAD_SIZE]
    embedding[:, _FREE.start : _FREE.start + associated.shape[1]] = associated
    embedding[:, _OWN] = _CODE * torch.randn_like(embedding[:, _OWN]).sign()
    words = torch.tensor(traits.words)
    codes = _CODE * torch.randn(int(words.max()) + 1, _WORD.stop - _WORD.start).sign()
    embedding[:, _WORD] = codes[words]
    for place, values in (
        (_RARITY_AT, traits.rarity),
        (_PLACE_AT[0], traits.beginning),
        (_ENDS_AT, traits.ends),
    ):
        embedding[:, place] = _FLAG * torch.tensor(values)
    embedding[traits.cue, _CUE_AT] = _FLAG
    embedding[:, _CONSTANT_AT] = _FLAG
    unique = embedding[:, _UNIQUE]
    others = embedding.square().sum(-1) - unique.square().sum(-1)
    left = (_HIDDEN_SIZE * _EMBEDDING_NORM**2 - others).clamp(min=0.1 * _HIDDEN_SIZE * _EMBEDDING_NORM**2)
    unique *= (left / unique.square().sum(-1)).sqrt()[:, None]
    embedding[list(traits.nothing)] = 0.0
    embedding[list(traits.nothing), _NOTHING_AT] = _HIDDEN_SIZE**0.5 * _EMBEDDING_NORM
    embedding[:, _BALLAST_AT] = _BALLAST


def _coordinates(part: slice, count: int | None = None, start: int = 0) -> list[int]:
    return list(range(part.start, part.stop))[start:][:count]


def _write_notes(attention: Any, turns: Sequence[float]) -> None:
    word = _coordinates(_WORD)
    for number, note in enumerate(_BEFORE):  # attends so many positions back
        head = _Head(attention, number)
        angles = [(number + 1) * turn for turn in turns[:_NUM_FAST]]
        curve = torch.tensor(angles).cos(), torch.tensor(angles).sin()
        head.mind_distance(curve, _CONSTANT_AT, 15.0 / _CONSTANT_READ**2)
        places = _coordinates(note)
        head.carry(word[: len(places)], places, _NOTED)
        # Behind an end something begins, unless what stands there is layout: a bracket, a dash, a line's end.
        if number >= len(_PLACE_AT):
            continue
        head.carry([_ENDS_AT], [_PLACE_AT[number]], 1.0)
        head.carry([_CUE_AT], [_CUED_AT[number]], 1.0)
        # Nor behind the point of a number: what cannot begin a sentence has no second token either.
        if number + 1 < len(_PLACE_AT):
            head.carry([_PLACE_AT[0]], [_PLACE_AT[number + 1]], 1.0)


def _write_sentences(attention: Any, turns: Sequence[float]) -> None:
    head = _Head(attention, 0)
    head.mind_distance(_falling(turns), _PLACE_AT[0], 60.0 / _CONSTANT_READ**2)
    sentence, first = _coordinates(_OF_SENTENCE), 0
    for source, count, factor in zip(
        (_OWN, *_BEFORE[1:]), _TELLING, (_NOTED, 1.0, 1.0, 1.0, 1.0), strict=True
    ):
        head.carry(_coordinates(source, count), sentence[first : first + count], factor)
        first += count


def _write_topics(attention: Any, turns: Sequence[float]) -> None:
    head = _Head(attention, 1)
    distances = torch.arange(_FARTHEST)
    recent = _curve(turns, ((30 - distances) / 6).sigmoid(), (-distances / 200).exp(), 1e-3)
    head.mind_distance(recent, _CONSTANT_AT, 10.0 / _CONSTANT_READ**2)
    head.prefer(_HALF - 1, _CONSTANT_AT, _RARITY_AT, 6.0 / _CONSTANT_READ**2)
    topics = _coordinates(_FREE, _HEAD_SIZE)
    head.carry(topics, topics, 4.0)


def _write_words(attention: Any, turns: Sequence[float]) -> None:
    head, constant = _Head(attention, 0), _CONSTANT_READ
    # Compared is the token before: so that no token finds itself.
    rows = [row for row in _STILL if row % _HALF != _HALF - 1]
    word, before = _coordinates(_WORD), _coordinates(_BEFORE[0])
    head.compare(rows[: len(word)], word, before, (2.5, 2.5))
    # Of several places that with the word before it as well: rare words are several tokens.
    head.compare(rows[len(word) :][:6], before[:6], _coordinates(_BEFORE[1], 6), (1.5, 1.5))
    head.prefer(_HALF - 1, _CONSTANT_AT, _NOTHING_AT, 20.0 / constant / _NOTHING_READ)
    head.carry(_coordinates(_OF_SENTENCE), _coordinates(_OF_FOUND), 0.1)
    head.carry([_CONSTANT_AT], [_FOUND_AT], 1.0)


def _write_votes(attention: Any, turns: Sequence[float]) -> None:
    head, constant = _Head(attention, 0), _CONSTANT_READ
    distances = torch.arange(_FARTHEST)
    recent = _curve(turns, ((36 - distances) / 6).sigmoid(), (-distances / 200).exp(), 1e-3)
    head.mind_distance(recent, _CONSTANT_AT, 16.0 / constant**2)
    row = _HALF - 1
    head.prefer(row, _CONSTANT_AT, _NOTHING_AT, 29.0 / constant / _NOTHING_READ)
    head.prefer(row, _CONSTANT_AT, _FOUND_AT, 18.0 / constant**2)
    head.prefer(row, _CONSTANT_AT, _RARITY_AT, 6.5 / constant**2)
    for cued in _CUED_AT[1:]:  # the question votes, not the answer
        head.prefer(row, _CONSTANT_AT, cued, -20.0 / constant**2)
    places = _coordinates(_OF_FOUND)
    head.carry(places, places, 6.0)


def _write_kept(attention: Any, turns: Sequence[float]) -> None:
    # Words of the answer stand in many sentences; the one quoted was found before the first of them.
    head, constant = _Head(attention, 0), _CONSTANT_READ
    head.mind_distance(_falling(turns), _CUED_AT[0], 90.0 / constant**2)
    head.prefer(_HALF - 1, _CONSTANT_AT, _NOTHING_AT, 10.0 / constant / _NOTHING_READ)
    places = _coordinates(_OF_FOUND)
    head.carry(places, places, 3.0)


def _write_quotation(attention: Any) -> None:
    constant = _CONSTANT_READ
    found, sentence = _coordinates(_OF_FOUND), _coordinates(_OF_SENTENCE)
    for number in range(POINTING_HEADS):
        head = _Head(attention, number)
        gain = 22.0**0.5 / 3
        head.compare(_STILL_BUT_TWO[: len(found)], found, sentence, (gain, gain))
        for row, cued, place in zip(_FLAG_ROWS, _CUED_AT, _PLACE_AT, strict=False):
            head.prefer(row, cued, place, 65.0 / constant**2)
        head.prefer(_FLAG_ROWS[-1], _CONSTANT_AT, _NOTHING_AT, 80.0 / constant / _NOTHING_READ)
        half_of_own = _coordinates(_OWN, _HEAD_SIZE, 32 * number)
        head.carry(half_of_own, half_of_own, 6.0)


def _write_induction(attention: Any) -> None:
    block = 10
    compared = [_WORD, *_BEFORE[:3]]  # each with the note of the one before it
    for number in range(2):
        head = _Head(attention, POINTING_HEADS + number)
        for place, gain in enumerate(_MATCH_GAINS):
            start = (place + number) % 2 * block if place < 2 else 0
            rows = _STILL[place * block : (place + 1) * block]
            query = _coordinates(compared[place], block, start)
            key = _coordinates(compared[place + 1], block, start)
            head.compare(rows[: len(key)], query[: len(key)], key, (gain, gain))
        # Where the same words stand twice, the sentence found is preferred.
        rows = _STILL[len(_MATCH_GAINS) * block :][:14]
        found, sentence = (_coordinates(part, 14, 8 + 14 * number) for part in (_OF_FOUND, _OF_SENTENCE))
        head.compare(rows, found, sentence, (1.7, 1.7))
        # One token alone is no match, and what a quotation begins with is no repetition.
        for silent in (_CONSTANT_AT, _CUED_AT[0]):
            head.prefer(_HEAD_SIZE - 2, silent, _NOTHING_AT, 34.0 / _CONSTANT_READ / _NOTHING_READ)
        half_of_own = _coordinates(_OWN, _HEAD_SIZE, 32 * number)
        head.carry(half_of_own, half_of_own, 5.0)


__all__ = ["POINTING_HEADS", "POINTING_LAYER", "begin_quoting", "circuit_weights", "fits", "held_weights"]
