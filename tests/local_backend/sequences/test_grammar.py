"""A grammar bounds the tokens of every tokenizer, and what it allows is a function of the tokens before."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import trainers
from transformers import PreTrainedTokenizerFast

from local_backend import Engine, SamplingParams
from local_backend.sequences.grammar import (
    Alternative,
    GrammarRule,
    alternatives_grammar,
    bound_scores,
    ignored_keywords,
    json_grammar,
)
from tests.families import FAMILIES, KINDS, tokenizer_of
from tests.tiny import tiny_chat_model, tiny_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name of it": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["bread", "beans", "ünï"]}, "maxItems": 3},
        "count": {"type": "integer", "minimum": -5, "maximum": 120},
    },
    "required": ["name of it", "tags", "count"],
}
_END, _QUOTES = "<end>", ('"', "<0x22>")


@functools.cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = KINDS[kind]()
    if kind == "unigram":  # it can write what it was trained on, it has no bytes
        text = '{"name of it": "x y", "tags": ["bread", "beans"], "count": -1234567890}'
        trainer = trainers.UnigramTrainer(special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
        tokenizer.train_from_iterator([text] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, unk_token="<unk>" if kind == "unigram" else None
    )


def _rule(tokenizer: PreTrainedTokenizerFast, grammar: str) -> GrammarRule:
    return GrammarRule(tokenizer, grammar, {tokenizer.eos_token_id}, len(tokenizer) + 9)


def _allowed(rule: GrammarRule, answer: list[int], size: int) -> set[int]:
    """Tokens that may follow an answer."""
    if (bits := rule(answer)) is None:
        return set(range(size))
    scores = bound_scores(torch.zeros(1, size), bits[None])
    return set((scores[0] == 0).nonzero()[:, 0].tolist())


def _follows(rule: GrammarRule, text: str) -> bool:
    """Whether all tokens of a text of the tiny tokenizer are allowed, one after the other."""
    answer = tiny_tokenizer().encode(text, add_special_tokens=False)
    return all(token in _allowed(rule, answer[:place], 500) for place, token in enumerate(answer))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_piece"])
def test_texts_that_follow_the_schema_are_allowed_token_by_token(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    rule = _rule(tokenizer, json_grammar(SCHEMA))
    names = ("x y", "") if kind == "unigram" else ("x y", 'é "quoted" \\ ', "🎉 and\nlines", "")
    for name in names:
        value = {"name of it": name, "tags": ["bread", "beans"], "count": -4}
        answer = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
        for place, token in enumerate(answer):
            allowed = _allowed(rule, answer[:place], len(tokenizer) + 9)
            assert token in allowed, (name, tokenizer.convert_ids_to_tokens(answer), place)
            assert tokenizer.eos_token_id not in allowed
        assert _allowed(rule, answer, len(tokenizer) + 9) == {tokenizer.eos_token_id}


def test_a_tokenizer_whose_tokens_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"cannot bound the tokens of this tokenizer: .*WordPiece"):
        _rule(_tokenizer("word_piece"), json_grammar(SCHEMA))


@pytest.mark.parametrize("kind", ["byte_level", "llama_2", "gemma", "unigram"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_whatever_is_chosen_the_text_follows_the_schema(kind: str, seed: int) -> None:
    tokenizer, rng = _tokenizer(kind), random.Random(seed)
    rule = _rule(tokenizer, json_grammar(SCHEMA))
    answer: list[int] = []
    while tokenizer.eos_token_id not in answer:
        allowed = sorted(_allowed(rule, answer, len(tokenizer) + 9))
        # Strings would seldom end by chance.
        quotes = [token for token in allowed if tokenizer.convert_ids_to_tokens(token) in _QUOTES]
        answer.append(rng.choice(quotes if quotes and len(answer) > 20 else allowed))
        assert len(answer) < 300
    text = tokenizer.decode(answer[:-1], clean_up_tokenization_spaces=False)
    value = json.loads(text)
    assert list(value) == SCHEMA["required"]
    assert isinstance(value["name of it"], str)
    assert len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"bread", "beans", "ünï"}
    assert -5 <= value["count"] <= 120


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_what_is_allowed_depends_on_the_tokens_before_alone(data: st.DataObject) -> None:
    """Drafts are tried and dropped: any other prefix may have been asked for in between."""
    tokenizer = tiny_tokenizer()
    texts = [
        '{"name of it": "aa", "tags": [], "count": 7}',
        '{"name of it": "ab", "tags": ["beans"], "count": 1}',
    ]
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    used = _rule(tokenizer, json_grammar(SCHEMA))
    for _ in range(8):
        answer = data.draw(st.sampled_from(answers))
        prefix = answer[: data.draw(st.integers(0, len(answer)))]
        fresh = _rule(tokenizer, json_grammar(SCHEMA))
        assert _allowed(used, prefix, 500) == _allowed(fresh, prefix, 500)


def test_nothing_is_said_of_what_follows_the_end() -> None:
    """A draft may go on behind the token that ends the row."""
    tokenizer = tiny_tokenizer()
    rule = _rule(tokenizer, json_grammar({"type": "boolean"}))
    answer = [*tokenizer.encode("true", add_special_tokens=False), tokenizer.eos_token_id]
    assert len(_allowed(rule, answer, 500)) == 500


def test_an_end_token_that_is_text_ends_only_a_whole_text() -> None:
    tokenizer = tiny_tokenizer()
    (letter,) = tokenizer.encode("e", add_special_tokens=False)
    rule = GrammarRule(tokenizer, json_grammar({"type": "string"}), {letter}, 500)
    begun = tokenizer.encode('"abc', add_special_tokens=False)
    assert letter not in _allowed(rule, begun, 500)
    assert _allowed(rule, [*begun, *tokenizer.encode('"', add_special_tokens=False)], 500) == {letter}


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a token that ends the answer"):
        GrammarRule(tiny_tokenizer(), json_grammar(SCHEMA), (), 500)


def test_the_grammar_wins_over_processors_that_leave_nothing() -> None:
    tokenizer = tiny_tokenizer()
    params = SamplingParams(max_tokens=30, min_tokens=20, grammar=json_grammar({"const": True}))
    with Engine(tiny_chat_model(), tokenizer) as engine:
        (completion,) = engine.generate([[5, 6]], params)
    assert completion.text.strip() == "true"
    assert completion.finish_reason == "stop"


def test_special_tokens_are_never_part_of_a_value() -> None:
    for family in FAMILIES:
        tokenizer = tokenizer_of(family)
        rule = _rule(tokenizer, json_grammar({"type": "string"}))
        allowed = _allowed(rule, tokenizer.encode('"a', add_special_tokens=False), len(tokenizer) + 9)
        specials = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special}
        assert not specials & allowed, family
        # Not even where a value has their text and the grammar leaves no choice.
        texts = [*FAMILIES[family].control, f"a {tokenizer.eos_token}\n"]
        rule, answer = _rule(tokenizer, json_grammar({"const": texts})), list[int]()
        while tokenizer.eos_token_id not in answer:
            answer.append(max(_allowed(rule, answer, len(tokenizer) + 9)))
            assert len(answer) < 500
        assert not specials & {*answer[:-1]}
        assert json.loads(tokenizer.decode(answer[:-1])) == texts, family


def test_an_object_has_the_properties_that_its_schema_names() -> None:
    tokenizer = tiny_tokenizer()

    def is_allowed(schema: dict[str, Any], text: str) -> bool:
        return _follows(_rule(tokenizer, json_grammar(schema)), text)

    one = {"type": "object", "properties": {"a": {"type": "integer"}}}
    nested = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/One"}]}, "$defs": {"One": one}}
    odd = {"type": "object", "properties": {"properties": {"type": "integer"}}, "required": ["properties"]}
    both = {"allOf": [one, {"type": "object", "properties": {"b": {"type": "integer"}}}]}
    assert is_allowed(one, '{"a": 1}')
    assert not is_allowed(one, '{"b": 1}')
    assert not is_allowed(nested, '[{"b": 1}]')
    assert is_allowed({**one, "additionalProperties": True}, '{"b": 1}')
    assert is_allowed({"type": "object"}, '{"b": 1}')
    assert is_allowed(odd, '{"properties": 1}')
    assert is_allowed({**one, **both}, '{"a": 1, "b": 2}')
    assert not is_allowed(one, '{ "a": 1}')  # white space could go on for ever


def test_each_alternative_has_its_own_definitions() -> None:
    schemas = [{"$ref": "#/$defs/A", "$defs": {"A": {"const": value}}} for value in (1, 2)]
    grammar = alternatives_grammar([Alternative(schemas[0], "a: "), Alternative(schemas[1], "b: ")])
    rule = _rule(tiny_tokenizer(), grammar)
    for text, is_allowed in (("a: 1", True), ("b: 2", True), ("b: 1", False)):
        assert _follows(rule, text) == is_allowed, text


def test_what_a_grammar_cannot_say_is_named() -> None:
    unique = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    assert "uniqueItems" in ignored_keywords(unique)[0]
    assert ignored_keywords(SCHEMA) == []
    for wrong in ({"type": "strin"}, {"$ref": "#/$defs/Missing"}, {"enum": []}):
        with pytest.raises(ValueError, match="this schema cannot bound an answer"):
            ignored_keywords(wrong)
    with pytest.raises(ValueError, match="this grammar cannot bound an answer"):
        _rule(tiny_tokenizer(), "start: (")
