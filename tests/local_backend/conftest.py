"""A tiny tokenizer and random-weight models: real components, small enough to run anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from local_backend import Engine
from local_backend.embedded.build import train_tokenizer
from local_backend.embedded.corpus import load_topics

VOCABULARY = 500


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(load_topics()[:6], VOCABULARY)


def random_llama(**changes: object) -> LlamaForCausalLM:
    """A model whose answers wander, so that a wrong position or mask shows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": 7,
            "pad_token_id": 0,
            **changes,
        }
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return random_llama()


@pytest.fixture
def engine(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Iterator[Engine]:
    with Engine(model, tokenizer, max_rows=8, prefill_chunk_tokens=48) as engine:
        yield engine


def ragged_prompts(count: int, *, seed: int = 0, longest: int = 70) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, VOCABULARY) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """What ``transformers`` itself writes."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_tokens,
    )
    return output[0, len(prompt) :].tolist()
