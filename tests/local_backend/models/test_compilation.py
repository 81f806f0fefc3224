"""The compile switch: the same words, whichever drafter, and nobody's model compiled unasked."""

from __future__ import annotations

import shutil

import pytest
from transformers import PreTrainedTokenizerBase

from local_backend import Engine, SamplingParams
from local_backend.models.compilation import compile_blocks, is_compiled
from tests.local_backend.models.architectures import random_model

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile makes its CPU kernels with a C++ compiler, and there is none",
)


@needs_a_compiler
# Inductor, when it is first imported, uses what torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_or_not_it_writes_the_same(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = tokenizer.encode("one two three four one two three four one two")
    params = SamplingParams(max_tokens=12, ignore_end=True)
    model = random_model("llama")
    with Engine(model, tokenizer) as engine:
        (plain,) = engine.generate([prompt], params)
    assert not is_compiled(model)
    for drafter in ("autoregressive", "reference_copy"):
        with Engine(model, tokenizer, drafter, compiled=True) as engine:
            assert is_compiled(model)
            assert all(layer.self_attn._compiled_call_impl is None for layer in model.base_model.layers)
            (compiled,) = engine.generate([prompt], params)
        assert compiled.token_ids == plain.token_ids


def test_a_mode_that_torch_does_not_have_is_named_with_those_it_has(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = random_model("llama")
    with pytest.raises(ValueError, match=r"no mode 'fastest'.*'reduce-overhead'"):
        Engine(model, tokenizer, compiled="fastest")
    assert not is_compiled(model)


def test_a_model_without_layers_that_are_known_is_refused() -> None:
    model = random_model("llama")
    model.model.layers = None
    with pytest.raises(ValueError, match="no decoder layers"):
        compile_blocks(model)
