"""The circuits the embedded model begins with, seen in where an untrained model attends."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.build import BuildOptions, make_model
from local_backend.embedded.corpus import load_topics
from local_backend.embedded.tokenization import ending_token_ids, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(load_topics()[:3], 900)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = make_model(BuildOptions(num_layers=4), tokenizer)
    model.set_attn_implementation("eager")
    model.eval()
    return model


@pytest.fixture(scope="module")
def sentences(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Of random tokens, none of which ends a sentence, and a full stop."""
    rng = random.Random(2)
    ends = set(ending_token_ids(tokenizer)) | set(tokenizer.all_special_ids)
    others = [token_id for token_id in range(len(tokenizer)) if token_id not in ends]
    full_stop = tokenizer.encode(".", add_special_tokens=False)
    return [rng.sample(others, rng.randint(6, 16)) + full_stop for _ in range(12)]


@torch.no_grad()
def attended(model: LlamaForCausalLM, token_ids: list[int], layer: int, head: int) -> Tensor:
    """For each position the one that gets most of a head's attention."""
    found: Tensor = model(torch.tensor([token_ids]), output_attentions=True).attentions[layer][0, head]
    return found.argmax(-1)


@pytest.mark.parametrize("head", range(3))
def test_every_token_knows_those_before_it(
    model: LlamaForCausalLM, sentences: list[list[int]], head: int
) -> None:
    token_ids = [token_id for sentence in sentences for token_id in sentence]
    places = torch.arange(head + 1, len(token_ids))
    assert torch.equal(attended(model, token_ids, 0, head)[places], places - head - 1)


@pytest.mark.parametrize(("head", "place"), [(2, 0), (3, 1)])
def test_every_token_knows_how_its_sentence_began(
    model: LlamaForCausalLM, sentences: list[list[int]], head: int, place: int
) -> None:
    token_ids = [token_id for sentence in sentences for token_id in sentence]
    found = attended(model, token_ids, 1, head)
    right = total = first = 0
    for sentence in sentences:
        if first:  # nothing ended before the first sentence
            right += int((found[first + place : first + len(sentence)] == first + place).sum())
            total += len(sentence) - place
        first += len(sentence)
    assert right > 0.9 * total


def test_a_word_of_the_question_finds_where_it_stood(
    model: LlamaForCausalLM, sentences: list[list[int]]
) -> None:
    token_ids = [token_id for sentence in sentences for token_id in sentence]
    once = [place for place, token_id in enumerate(token_ids) if token_ids.count(token_id) == 1]
    asked = random.Random(3).sample(once, 20)
    found = attended(model, token_ids + [token_ids[place] for place in asked], 2, 2)
    assert sum(found[len(token_ids) :].tolist()[number] == place for number, place in enumerate(asked)) >= 18


def test_an_ending_is_what_a_sentence_may_follow(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = {str(tokenizer.decode([token_id])) for token_id in ending_token_ids(tokenizer)}
    assert {".", "?", "\n", "<|user|>", "<|assistant|>"} <= texts
    assert not any(character.isalnum() for text in texts if "|" not in text for character in text)
