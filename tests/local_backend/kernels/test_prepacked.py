"""Prepacked products: the same numbers, for the engine alone, and never those of weights that are gone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from local_backend import Engine, SamplingParams
from local_backend.kernels import prepacked
from local_backend.kernels.prepacked import (
    LayerTensors,
    PrepackedLinear,
    PrepackedProduct,
    has_prepacked,
    prepack,
    prepacked_products,
)
from tests.local_backend.conftest import greedy

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN"
)


def _model(
    dtype: torch.dtype = torch.float32, vocabulary_size: int = 600, hidden_size: int = 512
) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=520,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval().to(dtype)
    return model


def _layer(dtype: torch.dtype) -> tuple[torch.nn.Linear, PrepackedLinear]:
    layer = torch.nn.Linear(640, 512).to(dtype)
    return layer, PrepackedLinear(PrepackedProduct([LayerTensors.of(layer)]), 0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 1), (2, 33), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_the_layers_own(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    layer, product = _layer(dtype)
    inputs = torch.randn(*shape, 640).to(dtype)
    with torch.inference_mode(), prepacked_products():
        said = product(inputs)
    assert said.dtype == dtype
    torch.testing.assert_close(
        said, layer(inputs).detach(), rtol=2e-2, atol=1e-2 if dtype.itemsize == 2 else 1e-5
    )


def test_weights_that_change_count_at_once() -> None:
    """Changed in place, as by an optimizer, or another tensor altogether."""
    layer, product = _layer(torch.float32)
    inputs = torch.randn(4, 640)

    def check() -> None:
        with torch.inference_mode(), prepacked_products():
            torch.testing.assert_close(product(inputs), layer(inputs).detach(), rtol=1e-4, atol=1e-4)

    check()
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.add_(1)
    check()
    layer.weight = torch.nn.Parameter(torch.randn(512, 640))
    check()


def test_an_engine_told_to_forget_reads_weights_changed_behind_torchs_back(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """As peft merges its adapters: through ``weight.data``, which torch does not count as a change."""
    model = _model(vocabulary_size=len(tokenizer))
    params = SamplingParams(max_tokens=8)
    with Engine(model, tokenizer, prepacked=True) as engine:
        engine.generate([[5, 6, 7]], params)
        model.lm_head.weight.data.neg_()
        engine.forget_weights()
        (prepacked,) = engine.generate([[5, 6, 7]], params)
    assert greedy(model, [5, 6, 7], 8) == prepacked.token_ids


def test_prepacked_weights_stay_when_prefixes_are_forgotten(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_packed = 0
    packed = prepacked._packed_product

    def counted(*tensors: torch.Tensor) -> object:
        nonlocal num_packed
        num_packed += 1
        return packed(*tensors)

    monkeypatch.setattr(prepacked, "_packed_product", counted)
    params = SamplingParams(max_tokens=4)
    with Engine(_model(vocabulary_size=len(tokenizer)), tokenizer, prepacked=True) as engine:
        (first,) = engine.generate([[5, 6, 7]], params)
        num_at_first, num_read = num_packed, engine.stats.num_prefilled_tokens
        assert num_at_first > 0
        engine.forget_prefixes()
        assert engine.generate([[5, 6, 7]], params)[0].token_ids == first.token_ids
        assert num_packed == num_at_first
        assert engine.stats.num_prefilled_tokens == 2 * num_read  # the prefix was read again
        engine.forget_weights()
        assert engine.generate([[5, 6, 7]], params)[0].token_ids == first.token_ids
        assert num_packed > num_at_first


def test_an_engine_made_on_a_model_trained_since_reads_its_new_weights(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """By the optimizer that ``transformers.Trainer`` takes, whose steps torch does not count as changes."""
    model = _model(vocabulary_size=len(tokenizer))
    with Engine(model, tokenizer, prepacked=True) as engine:
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(torch.tensor([[5, 6, 7]])).logits.square().sum().backward()
    optimizer.step()
    assert has_prepacked(model)
    params = SamplingParams(max_tokens=8)
    with Engine(model, tokenizer, prepacked=True) as engine:  # which compares with the model's own forward
        (prepacked,) = engine.generate([[5, 6, 7]], params)
    assert greedy(model, [5, 6, 7], 8) == prepacked.token_ids


def test_a_model_converted_since_is_multiplied_in_its_new_type() -> None:
    layer, product = _layer(torch.float32)
    inputs = torch.randn(4, 640)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        layer.to(dtype)
        with torch.inference_mode(), prepacked_products():
            said = product(inputs.to(dtype))
            torch.testing.assert_close(said, layer(inputs.to(dtype)), rtol=2e-2, atol=2e-2)


def test_whoever_else_calls_the_model_computes_as_before(tokenizer: PreTrainedTokenizerBase) -> None:
    """To the bit: beside an engine, on another thread, with gradients, and after it."""
    model = _model()
    ids = torch.randint(0, 600, (1, 9))
    before = model(input_ids=ids).logits
    with Engine(model, tokenizer, prepacked=True) as engine:
        assert has_prepacked(model)
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        assert torch.equal(model(input_ids=ids).logits, before)
        seen: list[torch.Tensor] = []
        with torch.no_grad(), prepacked_products():
            thread = threading.Thread(target=lambda: seen.append(model(input_ids=ids).logits.detach()))
            thread.start()
            thread.join()
        assert torch.equal(seen[0], before)
    model(input_ids=ids).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("drafter", ["autoregressive", "jacobi", "combined"])
def test_an_engine_writes_the_same_with_and_without(drafter: str, tokenizer: PreTrainedTokenizerBase) -> None:
    vocabulary_size = len(tokenizer)
    params = SamplingParams(max_tokens=24)
    prompts = [[(number * step) % vocabulary_size for number in range(1, 30)] for step in (3, 7)]
    written = []
    for is_prepacked in (True, False):
        model = _model(vocabulary_size=vocabulary_size)
        with Engine(model, tokenizer, drafter, prepacked=is_prepacked) as engine:
            assert has_prepacked(model) == is_prepacked
            written.append([completion.token_ids for completion in engine.generate(prompts, params)])
    assert written[0] == written[1]


def test_a_copy_of_a_model_multiplies_with_its_own_weights() -> None:
    model = _model()
    assert prepack(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    with torch.inference_mode(), prepacked_products():
        ids = torch.tensor([[1, 2, 3]])
        assert not other(input_ids=ids).logits.any()
        assert model(input_ids=ids).logits.any()


def test_small_layers_and_other_types_are_left_alone() -> None:
    model = _model(hidden_size=64)
    assert prepack(model)
    assert isinstance(model.lm_head.forward, PrepackedLinear)
    assert not isinstance(model.model.layers[0].self_attn.k_proj.forward, PrepackedLinear)
    assert not prepack(_model(torch.float64))


def test_layers_that_read_the_same_inputs_are_one_product() -> None:
    model = _model()
    assert prepack(model)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    products = [
        layer.forward.product
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        if isinstance(layer.forward, PrepackedLinear)
    ]
    assert products[0] is products[1] is products[2] is not products[3]
    assert products[0].is_of([attention.q_proj, attention.k_proj, attention.v_proj])
    assert mlp.gate_proj.forward.product is mlp.up_proj.forward.product is not mlp.down_proj.forward.product
    ids = torch.randint(0, 600, (2, 9))
    want = model(input_ids=ids).logits.detach()
    with torch.inference_mode(), prepacked_products():
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)


def test_layers_of_one_product_may_be_called_with_other_inputs_and_in_any_order() -> None:
    layers = [torch.nn.Linear(640, size) for size in (512, 96, 320)]
    product = PrepackedProduct([*map(LayerTensors.of, layers)])
    forwards = [PrepackedLinear(product, index) for index in range(len(layers))]
    one, other = torch.randn(2, 3, 640), torch.randn(5, 640)
    with torch.inference_mode(), prepacked_products():
        for index, inputs in ((0, one), (1, one), (2, other), (0, other), (2, one), (2, one), (0, one)):
            want = layers[index](inputs)
            torch.testing.assert_close(forwards[index](inputs), want, rtol=1e-4, atol=1e-4)
        layers[1].weight = torch.nn.Parameter(torch.randn(96, 640), requires_grad=False)
        fresh = torch.randn(4, 640)
        for index in (1, 0):
            torch.testing.assert_close(forwards[index](fresh), layers[index](fresh), rtol=1e-4, atol=1e-4)


def test_a_layer_that_was_replaced_leaves_the_others_right() -> None:
    model = _model()
    assert prepack(model)
    attention = model.model.layers[0].self_attn
    attention.k_proj = torch.nn.Linear(512, 256)
    with torch.no_grad():
        attention.v_proj.weight.mul_(2)
    ids = torch.randint(0, 600, (2, 9))
    want = model(input_ids=ids).logits.detach()
    with torch.inference_mode(), prepacked_products():
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)
