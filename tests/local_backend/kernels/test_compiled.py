"""Compiled layers compute what the model computes, in few kernels."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from local_backend import Engine, SamplingParams
from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting.draft import EMPTY_DRAFT
from local_backend.kernels.graphs import Execution
from local_backend.kernels.llama_forward import JoinedWeights, LlamaForward
from local_backend.models.architecture import Architecture
from local_backend.models.runner import ModelRunner
from tests.local_backend.models.architectures import WINDOW, random_model
from tests.tiny import random_llama, tiny_tokenizer

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
PROMPTS = [[11, 12, 13, 14] * 5, [31, 32, 33], [41, 42, 43, 44, 45] * 9, [21] * 7]


# Windows, full attention, biases and norms of heads in one model: each graph is compiled for seconds.
EVERYTHING = {
    "attention_bias": True,
    "head_dim": 12,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}


@needs_compiler
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("qwen3", EVERYTHING, id="everything"),
        *(
            pytest.param(name, {}, id=name, marks=pytest.mark.slow)
            for name in ("llama", "mistral", "qwen2", "qwen3")
        ),
    ],
)
def test_compiled_layers_decode_the_same(family: str, changes: dict[str, object]) -> None:
    """Prompts of one and several rows, drafts, trees, windows, biases and norms of heads."""
    params = [SamplingParams(max_tokens=count, temperature=0.0) for count in (24, 40, 9, 30)]
    params[3] = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=5)
    found = []
    for drafter, compiled in (("autoregressive", False), ("combined", True)):
        model = random_model(family, **changes)
        with Engine(model, tiny_tokenizer(), drafter, max_rows=3, compiled=compiled) as engine:
            found.append([one.token_ids for one in engine.generate(PROMPTS, params)])
    assert found[0] == found[1]


@needs_compiler
def test_a_compiled_layer_takes_at_most_fifteen_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, attention, copies and what torch generates; the difference of five layers and two."""
    torch.compiler.reset()  # what earlier tests compiled tells the profiler of no kernel
    monkeypatch.setattr("torch._inductor.config.cpp.enable_kernel_profile", True)
    kernels = [_kernels_of_a_forward(num_layers) for num_layers in (2, 5)]
    by_layer = {name: (count - kernels[0][name]) / 3 for name, count in kernels[1].items()}
    assert by_layer["aten::_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert 4 < sum(by_layer.values()) <= 15


def _kernels_of_a_forward(num_layers: int) -> Counter[str]:
    model = random_llama(num_hidden_layers=num_layers)
    cache = RaggedKVCache(num_layers, max_rows=3)
    run = ModelRunner(model, cache, Architecture.of(model), Execution(is_compiled=True))
    drafts = [EMPTY_DRAFT] * 3
    for _ in drafts:
        cache.add_row()
    run(0, [[1, 2, 3], [4, 5], [6]], drafts, with_logits=False)
    for row, length in enumerate((3, 2, 1)):
        cache.commit(row, range(length))
    run(0, [[1], [2], [3]], drafts)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run(0, [[1], [2], [3]], drafts)
    launching = ("aten::mm", "aten::addmm", "aten::copy_", "aten::_scaled_dot_product", "graph_")
    return Counter({one.key: one.count for one in profiled.key_averages() if one.key.startswith(launching)})


def test_joined_weights_are_views_that_can_be_trained_and_saved(tmp_path: Path) -> None:
    model = random_model("qwen2")
    before = {name: one.clone() for name, one in model.state_dict().items()}
    forward = LlamaForward.of(model, is_compiled=True)
    again = LlamaForward.of(model, is_compiled=True)
    assert forward is not None
    assert again is not None
    attention = model.model.layers[0].self_attn
    joined = JoinedWeights.of([attention.q_proj, attention.k_proj, attention.v_proj])
    assert joined.weight.data_ptr() == attention.q_proj.weight.data_ptr()  # not joined once more
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(before[name], one) for name, one in saved.items())
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    with torch.no_grad():
        attention.k_proj.weight.add_(1.0)
    size = len(attention.q_proj.weight)
    assert torch.equal(joined.weight[size : size + len(attention.k_proj.weight)], attention.k_proj.weight)
    assert forward.is_intact()
    assert again.is_intact()
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()
    assert not forward.is_intact()
