"""Weights in 4 bits: on a grid, through every kernel the same function, and no longer when they change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from local_backend import ChatLocal, Engine, SamplingParams
from local_backend.kernels.prepacked import (
    LayerTensors,
    PrepackedProduct,
    _has_units,
    prepack,
    prepacked_products,
)
from local_backend.kernels.quantization import GRID, GROUP_SIZE, product_in_4_bits, quantize
from local_backend.models.loading import load
from tests.tiny import tiny_chat_model, tiny_tokenizer


def _model(vocabulary_size: int = 500) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=512,
        intermediate_size=544,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)  # biases would be zero
    return model


class _Layers(torch.nn.Module):
    """Linear layers that read the same inputs, in what :func:`quantize` needs of a model."""

    dtype, device = torch.bfloat16, torch.device("cpu")

    def __init__(self, *sizes: int, num_inputs: int = 96, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [torch.nn.Linear(num_inputs, size, bias=bias) for size in sizes]
        self.layers = torch.nn.ModuleList(layers).to(torch.bfloat16)

    def get_output_embeddings(self) -> None:
        return None

    @property
    def linear(self) -> list[torch.nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, torch.nn.Linear)]


def _quantize(layers: _Layers) -> list[torch.nn.Linear]:
    quantize(layers, "int4")  # type: ignore[arg-type]  # not a whole model
    return layers.linear


def _quantized(*sizes: int, num_inputs: int = 96, bias: bool = True) -> list[torch.nn.Linear]:
    return _quantize(_Layers(*sizes, num_inputs=num_inputs, bias=bias))


def is_in_4_bits(layer: torch.nn.Module) -> bool:
    return hasattr(layer, GRID)


def _product(layers: list[torch.nn.Linear]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    grid = torch.cat([layer.get_buffer(GRID) for layer in layers])
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return product_in_4_bits(weight, grid, torch.cat(biases).detach() if biases else None)


# The grid --------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 10.0), st.floats(-2.0, 2.0))
@settings(max_examples=40, deadline=None)
def test_weights_move_by_at_most_half_a_step(seed: int, size: float, middle: float) -> None:
    layers = _Layers(16, num_inputs=64)
    (layer,) = layers.linear
    torch.manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(size * (torch.randn(16, 64) + middle))
    before = layer.weight.detach().float()
    _quantize(layers)
    groups = before.unflatten(1, (-1, GROUP_SIZE))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    moved = (layer.weight.detach().float() - before).unflatten(1, (-1, GROUP_SIZE)).abs().amax(-1)
    # Scale and zero point are rounded to bfloat16, of which 8 bits count, and so are the weights.
    rounding = 2**-7 * (groups.abs().amax(-1) + 8 * step)
    assert (moved <= step / 2 + rounding).all()


def test_a_grid_that_bfloat16_holds_comes_through_unchanged() -> None:
    """As the blocks of a GGUF's Q4_1, which use the first step and the last."""
    layers = _Layers(32, num_inputs=64)
    (layer,) = layers.linear
    steps = torch.randint(0, 16, (32, 2, GROUP_SIZE))
    steps[..., 3], steps[..., 17] = 0, 15
    scale = 2.0 ** torch.randint(-9, -4, (32, 2, 1))
    with torch.no_grad():
        layer.weight.copy_(((steps - 8) * scale + 4 * scale).flatten(1))
    before = layer.weight.detach().clone()
    _quantize(layers)
    assert torch.equal(layer.weight, before)


def test_equal_weights_stay_as_they_are() -> None:
    layers = _Layers(16, num_inputs=64)
    with torch.no_grad():
        layers.linear[0].weight[:8].zero_()
        layers.linear[0].weight[8:].fill_(0.5)
    _quantize(layers)
    assert layers.linear[0].weight.float().unique().tolist() == [0.0, 0.5]


def test_layers_that_the_kernel_cannot_take_keep_their_weights() -> None:
    for layer in (*_quantized(16, 24, num_inputs=64), *_quantized(16, num_inputs=80)):
        assert is_in_4_bits(layer) == (layer.in_features == 64 and layer.out_features == 16)
    before, after = _Layers(24, num_inputs=64).linear, _quantized(24, num_inputs=64)
    assert torch.equal(before[0].weight, after[0].weight)


# The kernel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 1), (2, 33), (0, 4)])
def test_the_kernel_multiplies_the_rounded_weights(shape: tuple[int, int], *, bias: bool) -> None:
    layers = _quantized(48, 16, 128, bias=bias)
    product = _product(layers)
    assert product is not None
    inputs = torch.randn(*shape, 96).to(torch.bfloat16)
    with torch.inference_mode():
        want = torch.cat([layer(inputs) for layer in layers], -1)
        torch.testing.assert_close(product(inputs), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_inputs", [64, 576, 1536])
def test_a_token_is_multiplied_the_same_whatever_is_beside_it(num_inputs: int) -> None:
    """To the bit: so drafts do not change what these layers compute."""
    product = _product(_quantized(192, 64, num_inputs=num_inputs))
    assert product is not None
    inputs = torch.randn(23, num_inputs).to(torch.bfloat16)
    with torch.inference_mode():
        whole = product(inputs)
        for width in (1, 2, 3, 4, 5, 8, 16):
            parts = [product(inputs[start : start + width]) for start in range(0, 23, width)]
            assert torch.equal(torch.cat(parts), whole), width


def test_weights_that_leave_their_grid_are_not_multiplied_in_4_bits() -> None:
    def shifted(layer: torch.nn.Linear) -> None:
        layer.weight.data[3, 5] += 1  # behind torch's back

    def scaled(layer: torch.nn.Linear) -> None:
        with torch.no_grad():
            layer.weight.mul_(1.5)

    def replaced(layer: torch.nn.Linear) -> None:
        layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))

    for change in (shifted, scaled, replaced):
        one, other = _quantized(16, 32)
        assert _product([one, other]) is not None
        change(other)
        assert _product([one, other]) is None
        assert _product([one]) is not None
        inputs = torch.randn(3, 96).to(torch.bfloat16)
        packed = PrepackedProduct([LayerTensors.of(one), LayerTensors.of(other)])
        with torch.inference_mode():
            outputs = packed(inputs)
            assert (outputs is not None) == _has_units(torch.bfloat16)  # else the layers compute themselves
            if outputs is not None:
                torch.testing.assert_close(outputs[:, 16:], other(inputs), rtol=2e-2, atol=2e-2)


def test_a_copy_is_in_4_bits_and_a_conversion_is_not() -> None:
    (layer,) = _quantized(16)
    assert _product([copy.deepcopy(layer)]) is not None
    assert _product([copy.deepcopy(layer).to(torch.float32)]) is None


# A model ---------------------------------------------------------------------------------------------


def test_a_model_in_4_bits_computes_the_same_in_every_kernel() -> None:
    model = _model()
    quantize(model, "int4")
    assert not is_in_4_bits(model.lm_head)
    assert prepack(model)
    for width in (1, 3, 8, 9, 40):
        ids = torch.randint(0, 500, (1, width))
        with torch.inference_mode():
            want = model(input_ids=ids).logits.float()
            with prepacked_products():
                said = model(input_ids=ids).logits.float()
        assert (said - want).abs().mean() < 0.05 * want.std()


@pytest.mark.parametrize("drafter", ["reference_copy", "combined"])
def test_drafts_change_an_answer_only_at_a_near_tie(drafter: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """As in bfloat16 without quantization: attention and the output layer round by the width."""
    model = _model(len(tokenizer))
    quantize(model, "int4")
    params = SamplingParams(max_tokens=40, ignore_end=True)
    prompts = [[(number * step) % len(tokenizer) for number in range(1, 30)] * 2 for step in (3, 7)]
    written = []
    for name in ("autoregressive", drafter):
        with Engine(model, tokenizer, name, prepacked=True) as engine:
            written.append([completion.token_ids for completion in engine.generate(prompts, params)])
    for prompt, plain, drafted in zip(prompts, *written, strict=True):
        assert len(plain) == len(drafted) == 40
        place = next((n for n, pair in enumerate(zip(plain, drafted, strict=True)) if len({*pair}) > 1), None)
        if place is not None:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[*prompt, *plain[:place]]])).logits[0, -1].float()
            assert (logits[plain[place]] - logits[drafted[place]]).abs() < 0.1 * logits.std()


# Loading ---------------------------------------------------------------------------------------------


def test_a_model_is_loaded_in_4_bits(tmp_path: Path) -> None:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    plain, _ = load(tmp_path, dtype="bfloat16")
    model, _ = load(tmp_path, dtype="bfloat16", quantization="int4")
    assert not any(is_in_4_bits(layer) for layer in plain.modules())
    assert any(is_in_4_bits(layer) for layer in model.modules())
    with ChatLocal.from_pretrained(tmp_path, dtype="bfloat16", quantization="int4", max_tokens=4) as chat:
        assert chat.invoke("Hello").response_metadata["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    ("quantization", "dtype", "said"),
    [("int8", "bfloat16", "must be \"int4\" or None, got 'int8'"), ("int4", "float32", "dtype='bfloat16'")],
)
def test_what_cannot_be_quantized_is_refused(
    quantization: str, dtype: str, said: str, tmp_path: Path
) -> None:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        ChatLocal.from_pretrained(tmp_path, dtype=dtype, quantization=quantization)
