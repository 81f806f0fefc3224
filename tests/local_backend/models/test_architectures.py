"""What the engine decodes it decodes exactly; what it cannot decode it refuses, with the reason, at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
)

from local_backend import Draft, Engine, Jacobi, SamplingParams
from local_backend.models.architecture import Architecture
from local_backend.models.runner import MaskRules, TreeShape
from tests.local_backend.conftest import assert_kept_as_read_afresh, greedy, ragged_prompts
from tests.local_backend.engine.test_engine import RandomTrees
from tests.local_backend.models.architectures import ARCHITECTURES, WINDOW, random_model


def _lossless(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_tokens: int = 14) -> None:
    """Random trees, which take every way to accept and roll back, change nothing."""
    prompts = ragged_prompts(3, seed=8)
    answers = {tuple(prompt): greedy(model, prompt, max_tokens) for prompt in prompts}
    with Engine(model, tokenizer, RandomTrees(answers), max_rows=2) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
    assert [completion.token_ids for completion in completions] == list(answers.values())
    assert sum(completion.stats.num_accepted for completion in completions) > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rollback_equals_a_fresh_prefill(architecture: str, tokenizer: PreTrainedTokenizerBase) -> None:
    model = random_model(architecture)
    prompts = ragged_prompts(3, seed=8)
    assert max(map(len, prompts)) > 2 * WINDOW
    answers = {tuple(prompt): greedy(model, prompt, 18) for prompt in prompts}
    with Engine(model, tokenizer, RandomTrees(answers)) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=18))
        written = [[*one, *done.token_ids] for one, done in zip(prompts, completions, strict=True)]
        assert_kept_as_read_afresh(engine, written)
    assert sum(completion.stats.num_accepted for completion in completions) > 0


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_eager_attention_takes_the_same_masks(architecture: str, tokenizer: PreTrainedTokenizerBase) -> None:
    model = random_model(architecture, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    _lossless(model, tokenizer)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gemma2", {"head_dim": 16, "sliding_window": WINDOW}),
        ("mixtral", {"sliding_window": WINDOW}),
        ("gpt_oss", {"head_dim": 16, "sliding_window": WINDOW}),
        ("falcon", {"alibi": False}),
        ("opt", {"word_embed_proj_dim": 48, "ffn_dim": 96}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_other_architectures(
    architecture: str, changes: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Experts, sinks, soft caps, learned positions: nothing here is made for a list of models."""
    _lossless(random_model(architecture, **changes), tokenizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_half_precision_is_no_reason_to_refuse(
    architecture: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Which token wins a near-tie depends on the batch's shape there, so only the calling is tested."""
    model = random_model(architecture).to(dtype)
    with Engine(model, tokenizer, "combined") as engine:
        completions = engine.generate(ragged_prompts(3), SamplingParams(max_tokens=20, ignore_end=True))
    assert all(len(completion.token_ids) == 20 for completion in completions)


# Positions -----------------------------------------------------------------------------------------


def test_a_row_at_its_last_position_shares_forwards_with_long_drafts(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Learned positions end: what fills a row behind its own short draft must not stand beyond them."""
    model = random_model("gpt2", n_positions=64)
    prompts = [*ragged_prompts(1, longest=3), list(range(10, 70))]
    with Engine(model, tokenizer, Jacobi(block_size=20)) as engine:
        assert engine.max_positions == 64
        completions = engine.generate(prompts, SamplingParams(ignore_end=True))
        with pytest.raises(ValueError, match="positions for 64"):
            engine.generate([list(range(64))])
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(prompt) + len(completion.token_ids) == 64
        want = greedy(model, prompt, 64 - len(prompt))
        assert completion.token_ids[: len(want)] == want


def test_long_rope_is_limited_to_where_it_does_not_change(tokenizer: PreTrainedTokenizerBase) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "rope_theta": 1e4}
    model = random_model("phi3", original_max_position_embeddings=96, rope_parameters=rope)
    with pytest.warns(UserWarning, match=r"positions for 256 tokens, but its long rope .* limited to 96"):
        engine = Engine(model, tokenizer, "combined")
    prompts = ragged_prompts(4, seed=8)
    with engine:
        completions = engine.generate(prompts, SamplingParams(ignore_end=True))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(prompt) + len(completion.token_ids) == 96
        want = greedy(model, prompt, 96 - len(prompt))
        assert completion.token_ids[: len(want)] == want


def test_dynamic_rope_changes_beyond_the_models_positions_only(tokenizer: PreTrainedTokenizerBase) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = random_model("llama", max_position_embeddings=80, rope_parameters=rope)
    prompts = ragged_prompts(4, seed=8)
    with Engine(model, tokenizer, "combined") as engine:
        completions = engine.generate(prompts, SamplingParams(ignore_end=True))
    for prompt, completion in zip(prompts, completions, strict=True):
        want = greedy(model, prompt, 80 - len(prompt))
        assert completion.token_ids[: len(want)] == want


# Masks ---------------------------------------------------------------------------------------------


def test_a_window_counts_positions_along_the_branch() -> None:
    """Row of four tokens, window of three; a tree in which columns and positions differ."""
    tree = TreeShape.of([4], [1], [Draft((1, 2, 3, 4), (-1, -1, 0, 2))], 5)
    assert tree.positions.tolist() == [[4, 5, 5, 6, 7]]
    mask = MaskRules({"sliding_attention": 3}, torch.bool).build(tree, 9, torch.device("cpu"))
    assert isinstance(mask, torch.Tensor)
    seen = [[column for column in range(9) if row[column]] for row in mask[0, 0].tolist()]
    assert seen == [[2, 3, 4], [3, 4, 5], [3, 4, 6], [4, 5, 7], [5, 7, 8]]


def test_a_tree_may_hang_from_a_prompt_that_is_read_with_it() -> None:
    tree = TreeShape.of([4, 2], [3, 1], [Draft((1, 2, 3), (-1, -1, 0)), Draft.chain([1])], 7)
    assert tree.positions.tolist() == [[4, 5, 6, 7, 7, 8, 8], [2, 3, 3, 3, 3, 3, 3]]
    mask = MaskRules({"full_attention": None}, torch.bool).build(tree, 11, torch.device("cpu"))
    assert isinstance(mask, torch.Tensor)
    seen = [[column for column in range(11) if row[column]] for row in mask[0, 0].tolist()]
    prompt = list(range(7))
    assert seen[:6] == [prompt[:5], prompt[:6], prompt, [*prompt, 7], [*prompt, 8], [*prompt, 7, 9]]
    assert [column for column in range(11) if mask[1, 0, 1, column]] == [0, 1, 2, 3]


def test_masks_come_per_kind_of_layer_where_kinds_differ() -> None:
    architecture = Architecture.of(random_model("gemma3_text"))
    assert architecture.windows == {"sliding_attention": WINDOW, "full_attention": None}
    tree = TreeShape.of([20, 3], [1, 1], [Draft.chain([1]), Draft()], 2)
    masks = MaskRules(architecture.windows, torch.float32).build(tree, 22, torch.device("cpu"))
    assert isinstance(masks, dict)
    visible = {kind: (mask == 0).sum(-1).squeeze(1).tolist() for kind, mask in masks.items()}
    assert visible["full_attention"][0] == [21, 22]
    assert visible["sliding_attention"][0] == [WINDOW, WINDOW]
    assert visible["sliding_attention"][1][0] == 4


# Where the weights lie -----------------------------------------------------------------------------


def test_offloaded_weights_work(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    random_model("llama").save_pretrained(tmp_path / "model")
    homes = dict.fromkeys(["model.layers.0", "model.layers.2", "model.norm", "model.rotary_emb"], "cpu")
    homes |= {"model.embed_tokens": "cpu", "model.layers.1": "disk", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=homes, offload_folder=tmp_path / "offloaded"
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"}
    _lossless(model, tokenizer, max_tokens=12)


class Int8Linear(torch.nn.Module):
    """Weights kept in eight bits and computed with in float, as weight-only quantisers do."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.detach())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states, self.weight.to(states.dtype) * self.scale)


def test_quantised_weights_work(tokenizer: PreTrainedTokenizerBase) -> None:
    model = random_model("llama")
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, Int8Linear(linear))
    _lossless(model, tokenizer)


def test_weights_of_several_types_work(tokenizer: PreTrainedTokenizerBase) -> None:
    """The mask must not decide what the layers compute in."""
    model = random_model("llama").to(torch.bfloat16)
    model.model.norm.float()
    model.lm_head.float()
    assert Architecture.of(model).mask_dtype == torch.bool
    with Engine(model, tokenizer, "combined") as engine:
        engine.generate(ragged_prompts(3), SamplingParams(max_tokens=10))


# What is refused -----------------------------------------------------------------------------------


def _t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, num_layers=1, num_heads=2, d_ff=16, d_kv=8)
    )


def _ignoring_masks() -> PreTrainedModel:
    model = random_model("llama")
    original = model.model.forward

    def forward(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return original(*args, attention_mask=None, **kwargs)

    model.model.forward = forward
    return model


def _counting_positions_itself() -> PreTrainedModel:
    model = random_model("llama")
    rotary = model.model.rotary_emb
    original = rotary.forward

    def forward(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return original(states, torch.arange(states.shape[1])[None].expand_as(position_ids))

    rotary.forward = forward
    return model


def _quantising_activations() -> PreTrainedModel:
    model = random_model("llama")

    def round_by_the_batch(_: object, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (states,) = arguments
        scale = states.abs().max() / 15
        return ((states / scale).round() * scale,)

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(round_by_the_batch)
    return model


def _without_weights() -> PreTrainedModel:
    with torch.device("meta"):
        return random_model("llama")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: random_model("mamba"), "MambaForCausalLM has layers of another kind .*model.generate"),
        (lambda: random_model("rwkv"), "RwkvForCausalLM has layers of another kind"),
        (lambda: random_model("jamba"), r"JambaForCausalLM .* \(linear_attention\)"),
        (lambda: random_model("lfm2", layer_types=["conv", "full_attention", "conv"]), r"\(conv\)"),
        (_t5, "T5ForConditionalGeneration is an encoder-decoder .*decoder-only"),
        (
            lambda: random_model("llama").model,
            "LlamaModel has no language-model head: .*AutoModelForCausalLM",
        ),
        (lambda: random_model("bloom"), "BloomForCausalLM does not take position_ids.*ALiBi"),
        (
            lambda: random_model("llama", attn_implementation="flex_attention"),
            "flex_attention.*set_attn_implementation",
        ),
        (lambda: random_model("gemma3_text", use_bidirectional_attention=True), "attends to later tokens"),
        (_without_weights, "no weights yet .*from_pretrained"),
        (_ignoring_masks, "ignores the mask"),
        (_counting_positions_itself, "the positions it is given"),
        (_quantising_activations, "quantises activations"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_with_the_reason(
    make: Callable[[], PreTrainedModel], words: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(make(), tokenizer)


def test_odd_logits_are_no_reason_to_refuse(tokenizer: PreTrainedTokenizerBase) -> None:
    """A head that was not trained yet; tokens that are never to be written."""
    model = random_model("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    Engine(model, tokenizer).close()
    model = random_model("llama")
    model.lm_head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, torch.tensor([3, 4]), -torch.inf)
    )
    _lossless(model, tokenizer)


def test_a_model_that_fails_by_itself_fails_with_its_own_error(tokenizer: PreTrainedTokenizerBase) -> None:
    model = random_model("llama")
    model.lm_head.register_forward_hook(_fail)
    with pytest.raises(ArithmeticError, match="planted"):
        Engine(model, tokenizer)


def test_a_model_that_cannot_be_called_so_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    model = random_model("llama")
    original = model.model.forward

    def forward(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim != 2:
            raise TypeError("masks are [rows, columns]")
        return original(*args, attention_mask=attention_mask, **kwargs)

    model.model.forward = forward
    with pytest.raises(ValueError, match=r"cannot be called as the engine calls it .*TypeError: masks are"):
        Engine(model, tokenizer)


def _fail(*_: object) -> None:
    raise ArithmeticError("planted")
