"""Structured output is the same with every drafter, in batches whose rows have different schemas."""

from __future__ import annotations

import functools
import json
from typing import Any
from unittest import mock

import pytest
from transformers import PreTrainedTokenizerBase

from local_backend import ChatLocal, Engine, SamplingParams
from local_backend.langchain.chat_format import chat_prompt
from local_backend.models.forward_cost import ForwardCost
from local_backend.sequences.grammar import json_grammar
from local_backend.sequences.outputs import Completion
from local_backend.sequences.sequence import Row
from tests.local_backend.conftest import ragged_prompts
from tests.local_backend.engine.test_engine import RandomTrees
from tests.tiny import tiny_chat_model, tiny_tokenizer

DRAFTERS = ("autoregressive", "jacobi", "lookahead", "reference_copy", "combined")
FREE = ForwardCost.flat(100_000)  # nothing is cut: every draft is verified whole
_WORD = {"type": "string", "maxLength": 12}
SCHEMAS: tuple[dict[str, Any] | None, ...] = (
    {
        "type": "object",
        "properties": {"name": _WORD, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
    {"type": "array", "items": {"enum": ["bread", "water", "yeast"]}, "minItems": 3, "maxItems": 6},
    None,
    {
        "type": "object",
        "properties": {"kind": {"const": "loaf"}, "parts": {"type": "array", "items": _WORD, "maxItems": 4}},
        "required": ["kind", "parts"],
    },
)
PROMPTS = ragged_prompts(8, seed=31)


def _params(**options: Any) -> list[SamplingParams]:
    """Of each prompt: every schema, and none, once and again."""
    grammars = [json_grammar(schema) if schema else None for schema in SCHEMAS] * 2
    return [
        SamplingParams(max_tokens=70, seed=number, grammar=grammar, **options)
        for number, grammar in enumerate(grammars)
    ]


@functools.cache
def _expected(temperature: float) -> list[Completion]:
    """Each alone and without drafts, what a grammar forces included."""
    with mock.patch.object(Row, "forced", []), Engine(tiny_chat_model(), tiny_tokenizer(), "none") as engine:
        params = _params(temperature=temperature)
        return [engine.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.5], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "random_trees"])
def test_tokens_are_the_same_with_drafts(drafter: str, temperature: float) -> None:
    expected = _expected(temperature)
    right = {
        tuple(prompt): completion.token_ids for prompt, completion in zip(PROMPTS, expected, strict=True)
    }
    texts = [
        ["So it says:", completion.text, expected[number - 1].text]
        for number, completion in enumerate(expected)
    ]
    with Engine(
        tiny_chat_model(),
        tiny_tokenizer(),
        RandomTrees(right) if drafter == "random_trees" else drafter,
        width_costs=FREE,
    ) as engine:
        completions = engine.generate(PROMPTS, _params(temperature=temperature), texts)
    assert [one.token_ids for one in completions] == [one.token_ids for one in expected]
    assert all(
        one.stats.num_accepted > 0 for one, schema in zip(completions, SCHEMAS * 2, strict=True) if schema
    )


def test_what_a_schema_forces_is_drafted_whatever_the_drafter() -> None:
    """The names of properties and the signs around them take forwards of their own otherwise."""
    names = ("the first number", "another one", "last")
    properties = {name: {"type": "integer", "maximum": 9} for name in names}
    schema = {"type": "object", "properties": properties, "required": [*names]}
    with Engine(tiny_chat_model(), tiny_tokenizer(), "none") as engine:
        params = SamplingParams(max_tokens=200, grammar=json_grammar(schema))
        (completion,) = engine.generate([PROMPTS[0]], params)
    assert list(json.loads(completion.text)) == [*names]
    assert completion.stats.num_forwards < 0.6 * len(completion.token_ids)


def test_the_answers_that_are_compared_follow_their_schemas() -> None:
    for temperature in (0.0, 1.5):
        for schema, completion in zip(SCHEMAS * 2, _expected(temperature), strict=True):
            if schema is None:
                assert completion.finish_reason == "length"
                continue
            assert completion.finish_reason == "stop", completion.text
            value = json.loads(completion.text)
            assert isinstance(value, list if schema["type"] == "array" else dict)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_the_default_model_fills_schemas_the_same_with_every_drafter(
    drafter: str, default_chat: ChatLocal
) -> None:
    plain = default_chat.engine
    tokenizer: PreTrainedTokenizerBase = plain.tokenizer
    text = "Anna is 31 years old. She likes chess and swimming."
    hobbies = {"type": "array", "items": {"type": "string"}, "maxItems": 3}
    schemas = [SCHEMAS[0], {"type": "object", "properties": {"hobbies": hobbies}, "required": ["hobbies"]}]
    params = [SamplingParams(max_tokens=40, grammar=json_grammar(schema)) for schema in schemas if schema]
    prompts = [chat_prompt(tokenizer, [{"role": "user", "content": text}])[0]] * 2
    expected = plain.generate(prompts, params)
    assert json.loads(expected[0].text)["age"] == 31
    with Engine(plain.model, tokenizer, drafter, width_costs=FREE) as engine:
        completions = engine.generate(prompts, params, [[text]] * 2)
    assert [one.token_ids for one in completions] == [one.token_ids for one in expected]
