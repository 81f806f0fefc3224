"""The picture of decoding shows one block a forward."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from local_backend import Engine, SamplingParams
from local_backend.visualize import landings

from .conftest import ragged_prompts


def test_blocks_are_forwards(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    with Engine(model, tokenizer) as engine:
        one, other = engine.generate(ragged_prompts(2), SamplingParams(max_tokens=9, ignore_end=True))
    assert one.stats.tokens_by_forward == [1] * 9
    other.stats.tokens_by_forward[:] = [4, 3, 2]
    axes = landings({"one": one, "other": other}).axes[0]
    widths = [path.get_extents().width for bars in axes.collections for path in bars.get_paths()]
    assert widths == [1] * 9 + [4, 3, 2]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "other"]


def test_nothing_to_draw_is_named() -> None:
    with pytest.raises(ValueError, match="at least one completion"):
        landings({})
