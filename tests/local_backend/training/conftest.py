"""A tiny task tokenizer and models with random weights: real components, small enough for every test."""

from __future__ import annotations

from itertools import islice

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.jacobi_tasks import TASKS, draw_cases
from benchmarks.jacobi_tasks.plain import PlainOptions, make_model, train_tokenizer

SHAPE = PlainOptions(hidden_size=32, num_layers=2, num_heads=2, vocabulary_size=320)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    cases = list(islice(draw_cases(TASKS["word_problems"], "train"), 200))
    return train_tokenizer(cases, SHAPE.vocabulary_size)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return make_model(SHAPE, tokenizer).eval()


@pytest.fixture(scope="session")
def prompts(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    cases = islice(draw_cases(TASKS["word_problems"], "test"), 12)
    return [tokenizer.encode(case.prompt, add_special_tokens=False) for case in cases]
