"""A drafter for each row: what a call names changes how it is drafted, and never what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from local_backend import Engine, SamplingParams
from local_backend.drafting import Jacobi, ReferenceCopy, make_drafter
from local_backend.drafting.by_row import ByRow
from local_backend.drafting.drafter import drafter_name
from tests.local_backend.conftest import greedy, ragged_prompts
from tests.local_backend.drafting.fake_rows import FakeRow

NAMES = ("none", None, "reference_copy", "jacobi", "lookahead", "combined", "autoregressive", "none")
TOKENS = 24


@pytest.fixture(scope="module", params=["autoregressive", "reference_copy"])
def engine(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Iterator[Engine]:
    from tests.tiny import tiny_tokenizer

    with Engine(model, tiny_tokenizer(), request.param, max_rows=4) as engine:
        yield engine


def test_rows_of_one_batch_are_drafted_as_each_asks_and_say_the_same(
    engine: Engine, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = ragged_prompts(len(NAMES))
    expected = [greedy(model, prompt, TOKENS) for prompt in prompts]
    references = [[str(tokenizer.decode(answer))] for answer in expected]  # what the row will say
    params = [SamplingParams(max_tokens=TOKENS, drafter=name) for name in NAMES]
    completions = engine.generate(prompts, params, references)
    assert [one.token_ids for one in completions] == expected
    num_drafted = [one.stats.num_drafted for one in completions]
    copies_by_default = isinstance(engine.drafter, ReferenceCopy)
    assert [bool(number) for number in num_drafted] == [
        name not in ("none", "autoregressive") and (name is not None or copies_by_default) for name in NAMES
    ]


def test_sampled_text_is_the_same_with_any_drafter(engine: Engine) -> None:
    (prompt,) = ragged_prompts(1)
    params = [SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=5, drafter=name) for name in NAMES]
    assert len({tuple(one.token_ids) for one in engine.generate([prompt] * len(NAMES), params)}) == 1


def test_a_name_that_the_default_has_is_the_default() -> None:
    default = Jacobi(block_size=3)
    by_row = make_drafter(default, lambda row: row.max_length)
    assert isinstance(by_row, ByRow)
    rows = [FakeRow([1, 2], max_length=cast("Any", name)) for name in ("jacobi", None)]
    for row in rows:
        drafters = [drafter for drafter, _ in by_row._groups([row])]
        assert drafters == [default]
    assert drafter_name(ReferenceCopy()) == "reference_copy"


def test_an_unknown_name_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="no drafter is named 'fast'; there are autoregressive, combined"):
        SamplingParams(drafter="fast")
