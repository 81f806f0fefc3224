"""A tiny tokenizer and a model of random weights."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from tests.tiny import random_llama, tiny_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return random_llama()
