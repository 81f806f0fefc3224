"""The circuits the embedded model begins with, seen in where an untrained model attends and what it says."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.build import BuildOptions, make_model
from local_backend.embedded.circuits import NUM_WRITTEN_HEADS, circuit_weights, fits, held_weights
from local_backend.embedded.corpus import load_topics
from local_backend.embedded.evaluation import edit_prompts, render, unseen_documents
from local_backend.embedded.optimizers import LearningRates, Optimizers
from local_backend.embedded.quoting import POINTING_HEADS, POINTING_LAYER
from local_backend.embedded.stream import FREE, HEAD_SIZE, HIDDEN_SIZE
from local_backend.embedded.tokenization import token_traits, train_tokenizer


@pytest.fixture(scope="module")
def sentences(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Of random words, each with a space before it, the first with a capital, and a full stop."""
    rng = random.Random(2)
    vocabulary = [str(tokenizer.decode([token_id])) for token_id in range(len(tokenizer))]
    words = [token_id for token_id, text in enumerate(vocabulary) if text[:1] == " " and text[1:].isalpha()]
    capitals = [token_id for token_id in words if vocabulary[token_id][1].isupper()]
    full_stop = tokenizer.encode(".", add_special_tokens=False)
    return [[first, *rng.sample(words, rng.randint(6, 16)), *full_stop] for first in rng.sample(capitals, 12)]


@pytest.fixture(scope="module")
def text(tokenizer: PreTrainedTokenizerFast, sentences: list[list[int]]) -> list[int]:
    """The sentences behind the token that begins every prompt."""
    nothing = token_traits(tokenizer, load_topics()).nothing[0]
    return [nothing, *(token_id for sentence in sentences for token_id in sentence)]


@torch.no_grad()
def attended(model: LlamaForCausalLM, token_ids: list[int], layer: int, head: int) -> Tensor:
    """For each position the one that gets most of a head's attention."""
    found: Tensor = model(torch.tensor([token_ids]), output_attentions=True).attentions[layer][0, head]
    return found.argmax(-1)


@pytest.mark.parametrize("head", range(5))
def test_every_token_knows_those_before_it(model: LlamaForCausalLM, text: list[int], head: int) -> None:
    places = torch.arange(head + 2, len(text))
    assert torch.equal(attended(model, text, 0, head)[places], places - head - 1)


def test_every_token_knows_where_its_sentence_began(
    model: LlamaForCausalLM, text: list[int], sentences: list[list[int]]
) -> None:
    found = attended(model, text, 1, 0)
    right = total = 0
    first = 1
    for sentence in sentences:
        if first > 1:  # nothing ended before the first sentence
            right += int((found[first : first + len(sentence)] == first).sum())
            total += len(sentence)
        first += len(sentence)
    assert right > 0.95 * total


def test_a_word_of_the_question_finds_what_followed_it_and_others_find_nothing(
    model: LlamaForCausalLM, text: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    words = token_traits(tokenizer, load_topics()).words
    once = [
        place for place, token_id in enumerate(text) if [words[i] for i in text].count(words[token_id]) == 1
    ]
    asked = random.Random(3).sample(once[1:], 20)
    there = {words[token_id] for token_id in text}
    strange = [i for i in range(400, len(tokenizer)) if words[i] not in there]
    row = text + [text[place] for place in asked] + random.Random(4).sample(strange, 60)
    found = attended(model, row, 2, 0)[len(text) :].tolist()
    assert sum(place == right + 1 for place, right in zip(found, asked, strict=False)) >= 19
    assert sum(place == 0 for place in found[20:]) >= 0.8 * 60  # now and then two words are alike


def test_nothing_attends_to_nothing_wherever_it_stands(model: LlamaForCausalLM, text: list[int]) -> None:
    """A later message's beginning must not gather notes, or it would be pointed at as a sentence."""
    row = [*text, text[0], *text[1:9]]
    for layer in range(5):
        assert int(attended(model, row, layer, 0)[len(text)]) in {0, len(text)}


@torch.no_grad()
def test_an_untrained_model_quotes_the_sentence_asked_for(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Its likeliest tokens, the right ones before them: which sentence to begin, and how it goes on."""
    began, went_on, count = 0, 0, 0
    for prompt in unseen_documents(60):
        request = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.messages[0][1]}], tokenize=False, add_generation_prompt=True
        )
        before = tokenizer.encode(f"{request}The documents say:", add_special_tokens=False)
        quotation = tokenizer.encode(" " + prompt.case.quotations[0].sentence, add_special_tokens=False)
        likeliest = model(torch.tensor([before + quotation])).logits[0, len(before) - 1 : -1].argmax(-1)
        began += int(likeliest[0] == quotation[0])
        went_on += int((likeliest[3:] == torch.tensor(quotation[3:])).sum())
        count += len(quotation) - 3
    assert began > 0.7 * 60  # by chance one of seven or so
    assert went_on > 0.9 * count


@torch.no_grad()
def test_an_untrained_model_copies_an_answer_in_order() -> None:
    """Wherever its last three tokens stood before, and where they stood twice, by those before them.

    With the tokens that ship: which numbers of headings look alike to it is a matter of tokens. Of 2,400 it
    takes one heading in twenty for another, or none.
    """
    options = BuildOptions()
    tokenizer = train_tokenizer(load_topics(), options.vocabulary_size)
    model = make_model(options, tokenizer).eval()
    right: dict[str, list[bool]] = {"once": [], "twice": [], "heading": []}
    for prompt in edit_prompts(load_topics()[:14]):
        if prompt.kind != "add":
            continue
        before, reply = render(tokenizer, prompt.messages), tokenizer.encode(prompt.messages[1][1])
        row = before + reply
        likeliest = model(torch.tensor([row])).logits[0].argmax(-1).tolist()
        for place in range(len(before) + 3, len(row) - 1):
            last = row[place - 2 : place + 1]
            follow = [before[n + 3] for n in range(len(before) - 3) if before[n : n + 3] == last]
            is_heading = str(tokenizer.decode(last)).endswith(". **")
            kind = "heading" if is_heading else "once" if len(set(follow)) == 1 else "twice"
            if follow:
                right[kind].append(likeliest[place] == row[place + 1])
    share = {kind: sum(marks) / len(marks) for kind, marks in right.items()}
    assert share["once"] > 0.99
    assert share["twice"] > 0.85  # by three tokens alone it would be half
    assert share["heading"] > 0.99


@torch.no_grad()
def test_without_an_announcement_nothing_is_pointed_at(model: LlamaForCausalLM, text: list[int]) -> None:
    for heads in range(POINTING_HEADS):
        assert (attended(model, text, POINTING_LAYER, heads) == 0).float().mean() > 0.95


def test_what_a_circuit_reads_is_left_alone_below_it(model: LlamaForCausalLM) -> None:
    """No lower layer's training writes into a coordinate that a written head reads."""
    held, names = held_weights(model), {id(parameter): name for name, parameter in model.named_parameters()}
    layers = model.model.layers
    for number, (layer, num_heads) in enumerate(zip(layers, NUM_WRITTEN_HEADS, strict=True)):
        attention, rows = layer.self_attn, slice(0, num_heads * HEAD_SIZE)
        read = torch.zeros(HIDDEN_SIZE, dtype=torch.bool)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            read |= (projection.weight[rows] != 0).any(0)
        assert read[: FREE.start].any()
        read[FREE.start :] = False  # what training writes there is meant to be gathered, too
        for below in layers[:number]:
            for module in (below.self_attn.o_proj, below.mlp.down_proj):
                assert held[names[id(module.weight)]][read].all(), number


def test_training_leaves_the_circuits_to_their_own_optimizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """What is theirs changes by shares of itself, if at all; zero stays zero, and a sign stays."""
    model = make_model(BuildOptions(), tokenizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    held, circuits = held_weights(model), circuit_weights(model)
    rates = LearningRates(circuits=0.01)
    optimizers = Optimizers(model, rates, weight_decay=0.1, num_tuning_steps=1)
    rng = torch.Generator().manual_seed(0)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        optimizers.collect()
        optimizers.step(step, 1.0)
        if step == 0:  # the circuits are tuned first, and nothing else
            for name, parameter in model.named_parameters():
                still = ~circuits[name] if name in circuits else torch.ones_like(parameter, dtype=torch.bool)
                assert torch.equal(parameter[still], before[name][still])
    for name, parameter in model.named_parameters():
        mask = held.get(name, torch.zeros_like(parameter, dtype=torch.bool))
        theirs = circuits.get(name, torch.zeros_like(mask))
        assert torch.equal(parameter[mask & ~theirs], before[name][mask & ~theirs])
        ratio = parameter[theirs] / before[name][theirs]
        assert (ratio > 0).all()
        assert (ratio.log().abs() < 0.05).all()
        if not mask.all() and not name.endswith("layernorm.weight"):
            assert (parameter[~mask] != before[name][~mask]).float().mean() > 0.5
    assert not fits(make_model(BuildOptions(hidden_size=60), tokenizer))


def test_a_word_is_the_same_in_any_case_and_layout_begins_no_sentence(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    traits, vocabulary = token_traits(tokenizer, load_topics()), tokenizer.get_vocab()
    the = [vocabulary[text] for text in ("The", "Ġthe", "ĠThe", "the") if text in vocabulary]
    assert len(the) >= 3
    assert len({traits.words[token_id] for token_id in the}) == 1
    assert all(traits.rarity[token_id] < 0.2 for token_id in the)
    for mark in ".?:":
        assert traits.ends[vocabulary[mark]] == 1
        assert traits.rarity[vocabulary[mark]] < 0
    assert traits.ends[vocabulary["Ċ"]] == 1
    assert traits.beginning[vocabulary["Ċ"]] == -1 < traits.beginning[vocabulary["7"]] < 0
    assert traits.beginning[vocabulary["ĠThe"]] == 0
