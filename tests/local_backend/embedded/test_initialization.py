"""The circuits the embedded model begins with, seen in where an untrained model attends and what it says."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.build import BuildOptions, make_model
from local_backend.embedded.corpus import load_topics
from local_backend.embedded.evaluation import unseen_documents
from local_backend.embedded.initialization import circuit_weights
from local_backend.embedded.tokenization import token_traits, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(load_topics(), 2400)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = make_model(BuildOptions(), tokenizer)
    model.set_attn_implementation("eager")
    model.eval()
    return model


@pytest.fixture(scope="module")
def sentences(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Of random words, each with a space before it, and a full stop."""
    rng = random.Random(2)
    vocabulary = [str(tokenizer.decode([token_id])) for token_id in range(len(tokenizer))]
    words = [token_id for token_id, text in enumerate(vocabulary) if text[:1] == " " and text[1:].isalpha()]
    full_stop = tokenizer.encode(".", add_special_tokens=False)
    return [rng.sample(words, rng.randint(6, 16)) + full_stop for _ in range(12)]


@pytest.fixture(scope="module")
def text(tokenizer: PreTrainedTokenizerFast, sentences: list[list[int]]) -> list[int]:
    """The sentences behind the token that begins every prompt."""
    nothing = token_traits(tokenizer).nothing[0]
    return [nothing, *(token_id for sentence in sentences for token_id in sentence)]


@torch.no_grad()
def attended(model: LlamaForCausalLM, token_ids: list[int], layer: int, head: int) -> Tensor:
    """For each position the one that gets most of a head's attention."""
    found: Tensor = model(torch.tensor([token_ids]), output_attentions=True).attentions[layer][0, head]
    return found.argmax(-1)


@pytest.mark.parametrize("head", range(3))
def test_every_token_knows_those_before_it(model: LlamaForCausalLM, text: list[int], head: int) -> None:
    places = torch.arange(head + 2, len(text))
    assert torch.equal(attended(model, text, 0, head)[places], places - head - 1)


@pytest.mark.parametrize("place", range(3))
def test_every_token_knows_how_its_sentence_began(
    model: LlamaForCausalLM, text: list[int], sentences: list[list[int]], place: int
) -> None:
    found = attended(model, text, 1, place + 1)
    right = total = 0
    first = 1
    for sentence in sentences:
        if first > 1:  # nothing ended before the first sentence
            right += int((found[first + place : first + len(sentence)] == first + place).sum())
            total += len(sentence) - place
        first += len(sentence)
    assert right > 0.95 * total


def test_a_word_of_the_question_finds_where_it_stood_and_others_find_nothing(
    model: LlamaForCausalLM, text: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    words = token_traits(tokenizer).words
    once = [
        place for place, token_id in enumerate(text) if [words[i] for i in text].count(words[token_id]) == 1
    ]
    asked = random.Random(3).sample(once[1:], 20)
    strange = [
        i for i in range(400, len(tokenizer)) if words[i] >= 0 and words[i] not in {words[j] for j in text}
    ]
    found = attended(model, text + [text[place] for place in asked] + strange[:20], 2, 2)[
        len(text) :
    ].tolist()
    assert sum(place == right for place, right in zip(found, asked, strict=False)) >= 19
    assert sum(place == 0 for place in found[20:]) >= 19


@torch.no_grad()
def test_an_untrained_model_quotes_the_sentence_asked_for(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Its likeliest tokens, the right ones before them: which sentence to begin, and how it goes on."""
    began, went_on, count = 0, 0, 0
    for prompt in unseen_documents(40):
        request = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.messages[0][1]}], tokenize=False, add_generation_prompt=True
        )
        before = tokenizer.encode(f"{request}The documents say:", add_special_tokens=False)
        quotation = tokenizer.encode(" " + prompt.case.quotations[0].sentence, add_special_tokens=False)
        likeliest = model(torch.tensor([before + quotation])).logits[0, len(before) - 1 : -1].argmax(-1)
        began += int(likeliest[0] == quotation[0])
        went_on += int((likeliest[3:] == torch.tensor(quotation[3:])).sum())
        count += len(quotation) - 3
    assert began > 0.4 * 40  # by chance one of seven or so
    assert went_on > 0.7 * count


@torch.no_grad()
def test_the_circuits_are_views_of_the_model(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(BuildOptions(), tokenizer)
    views = circuit_weights(model)
    assert len(views) == 4 * 12
    views[0].fill_(7.0)
    assert (model.model.layers[0].self_attn.q_proj.weight[:64] == 7).all()
    assert circuit_weights(make_model(BuildOptions(hidden_size=64), tokenizer)) == []


def test_a_word_is_the_same_in_any_case_and_layout_begins_no_sentence(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    traits, vocabulary = token_traits(tokenizer), tokenizer.get_vocab()
    the = [vocabulary[text] for text in ("The", "Ġthe", "ĠThe", "the") if text in vocabulary]
    assert len(the) >= 3
    assert len({traits.words[token_id] for token_id in the}) == 1
    assert all(traits.rarity[token_id] < 0.2 for token_id in the)
    for mark in ".?:":
        assert traits.ends[vocabulary[mark]] == 1
        assert traits.words[vocabulary[mark]] == -1
    assert traits.ends[vocabulary["Ċ"]] == traits.layout[vocabulary["Ċ"]] == 1
    assert traits.beginning[vocabulary["Ċ"]] < traits.beginning[vocabulary["7"]] < 0
    assert traits.beginning[vocabulary["ĠThe"]] == 0
