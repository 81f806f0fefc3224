"""Forwards in few operations compute what the model computes, or leave the model alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting.draft import EMPTY_DRAFT, Draft
from local_backend.kernels.llama_forward import LlamaForward
from local_backend.models.architecture import Architecture
from local_backend.models.runner import ModelRunner
from tests.local_backend.models.architectures import random_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def _logits(model: PreTrainedModel, *, is_fused: bool) -> list[Tensor]:
    """Logits of a prompt, of single tokens, of chains and trees, with rows of equal and other lengths."""
    architecture = Architecture.of(model)
    cache = RaggedKVCache(architecture.num_layers, max_rows=2)
    hook = None if is_fused else model.register_forward_hook(lambda *_: None)  # leaves it to the model
    assert (LlamaForward.of(model) is not None) == is_fused
    run = ModelRunner(model, cache, architecture)
    logits = []

    def forward(unread: list[list[int]], drafts: list[Draft]) -> None:
        found = run(0, unread, drafts)
        assert found is not None
        logits.extend(found[row, : 1 + len(draft)] for row, draft in enumerate(drafts))
        for row, tokens in enumerate(unread):
            cache.commit(row, range(len(tokens)))

    with torch.inference_mode():
        cache.add_row()
        forward([[*range(3, 24)]], [EMPTY_DRAFT])
        forward([[5]], [EMPTY_DRAFT])
        forward([[6]], [Draft.chain([9, 8, 7])])
        forward([[6]], [Draft((9, 8, 7, 6), (-1, -1, 0, 1))])
        forward([[7]], [Draft.chain(range(40, 63))])
        cache.add_row()
        forward([[8], [*range(60, 75)]], [EMPTY_DRAFT, EMPTY_DRAFT])
        forward([[9], [4]], [EMPTY_DRAFT, Draft.chain([3])])
        forward([[9], [4]], [EMPTY_DRAFT, EMPTY_DRAFT])
        run(0, [[*range(5, 12)], [4]], [EMPTY_DRAFT, EMPTY_DRAFT], with_logits=False)
    if hook is not None:
        hook.remove()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_logits_are_those_of_the_model(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = random_model(family).to(dtype)
    ours, own = _logits(model, is_fused=True), _logits(model, is_fused=False)
    for one, other in zip(ours, own, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().mean() <= tolerance * other.std()


def test_in_bfloat16_it_is_nearer_to_float32_than_the_modules() -> None:
    """The sums of layers and the best logits are computed in float32; single logits differ by chance."""
    off = {True: 0.0, False: 0.0}
    for family in FAMILIES:
        exact = _logits(random_model(family).bfloat16().float(), is_fused=False)
        model = random_model(family).bfloat16()
        for is_fused in off:
            pairs = zip(_logits(model, is_fused=is_fused), exact, strict=True)
            off[is_fused] += sum(
                float((one - other).gather(-1, other.topk(8).indices).abs().sum()) for one, other in pairs
            )
    assert off[True] < off[False]


def _hook(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def _patch(model: PreTrainedModel) -> None:
    norm = model.model.norm
    norm.forward = norm.forward


def _adapt(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj)


@pytest.mark.parametrize("change", [_hook, _patch, _adapt])
def test_a_changed_model_is_called_as_it_is(change: Callable[[PreTrainedModel], None]) -> None:
    model = random_model("llama")
    forward = LlamaForward.of(model)
    assert forward is not None
    assert forward.is_intact()
    change(model)
    assert not forward.is_intact()
    assert LlamaForward.of(model) is None


def test_other_models_are_not_taken() -> None:
    assert LlamaForward.of(random_model("gpt2")) is None
    assert LlamaForward.of(random_model("llama", hidden_act="gelu")) is None
    assert LlamaForward.of(random_model("llama", attn_implementation="eager")) is None
