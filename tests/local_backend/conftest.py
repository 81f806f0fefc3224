"""Invariants run on a tiny tokenizer and random-weight models; see :mod:`tests.tiny`."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from local_backend import ChatLocal, Engine, SamplingParams
from tests.tiny import VOCABULARY, random_llama, tiny_chat, tiny_tokenizer


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """What a test draws from torch's own generator depends on no other test."""
    torch.manual_seed(0)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return random_llama()


@pytest.fixture
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of models is kept in, and imported from, a folder of the test's own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def engine(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Iterator[Engine]:
    with Engine(model, tokenizer, max_rows=8, prefill_chunk_tokens=48) as engine:
        yield engine


@pytest.fixture(scope="session")
def chat() -> Iterator[ChatLocal]:
    """A chat model of random weights: quick, and what it says means nothing."""
    with tiny_chat() as chat:
        yield chat


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


def assert_kept_as_read_afresh(engine: Engine, texts: list[list[int]]) -> None:
    """The engine, which has just written the texts, goes on from what it kept as the model does from them."""
    params = SamplingParams(max_tokens=1, ignore_end=True, logprobs=VOCABULARY)
    for text in texts:
        (went_on,) = engine.generate([text], params)
        assert went_on.stats.num_prefilled == 0
        assert went_on.logprobs is not None
        with torch.no_grad():
            afresh = engine.model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
        told = dict(went_on.logprobs[0].top)
        torch.testing.assert_close(
            torch.tensor([told[token] for token in range(len(afresh))]), afresh, atol=1e-4, rtol=0
        )
