"""An embedded model as it is before its first step of training."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.build import BuildOptions, make_model
from local_backend.embedded.corpus import load_topics
from local_backend.embedded.tokenization import train_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(load_topics(), 2400)


@pytest.fixture(scope="package")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = make_model(BuildOptions(), tokenizer)
    model.set_attn_implementation("eager")
    model.eval()
    return model
