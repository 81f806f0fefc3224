"""Perception in advance: replies are read, and a model that names no number predicts none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from benchmarks.paper_scheduling.perception import PerceptionInAdvance, parse_length, split_announced
from local_backend import Engine
from local_backend.scheduling.lengths import Prediction


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("120", 120 * 1.35),
        ("About 1,200 words.", 1200 * 1.35),
        ("100-150 words", 150 * 1.35),
        ("350 tokens", 350),
        ("1.5k tokens", 1500),
        ("a hundred and fifty words", 150 * 1.35),
        ("Two sentences.", 40 * 1.35),
        ("I cannot say.", None),
        ("0", None),
        ("", None),
        ("9" * 400, None),
    ],
)
def test_replies_are_read(text: str, tokens: float | None) -> None:
    assert parse_length(text) == (None if tokens is None else pytest.approx(tokens))


@given(st.text(max_size=60))
def test_no_reply_breaks_the_reading(text: str) -> None:
    found = parse_length(text)
    assert found is None or 0 < found < 1e10


def test_an_announcement_is_split_from_the_answer() -> None:
    assert split_announced("(Length of this answer in tokens: 42) Well then.") == (42, "Well then.")
    assert split_announced("Well then.") == (None, "Well then.")


class _Replying:
    """An engine whose model says how many tokens its prompt has; keyed by the prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.max_positions = 2000
        self.asked: list[str] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: Any, references: Any = None) -> Any:
        texts = [self.tokenizer.decode(list(prompt)) for prompt in prompts]
        self.asked += [str(text) for text in texts]
        replies = ["30" if "tea" in text else "no idea" for text in self.asked[-len(prompts) :]]
        return [type("Reply", (), {"text": reply})() for reply in replies]


@pytest.mark.parametrize("form", ["asked", "announced"])
def test_the_model_is_asked(form: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    engine = _Replying(tokenizer)
    perception = PerceptionInAdvance(engine, form=form, unit="tokens", max_share=2.0)
    prompts = [tokenizer.encode(text) for text in ("How is tea made?", "Why {braces}?")]
    assert perception.predict([*prompts, [30] * 3000]) == [Prediction(30, 60), None, None]
    assert all("tokens" in text for text in engine.asked)
    assert perception.predict([]) == []
    with pytest.raises(ValueError, match="max_share"):
        PerceptionInAdvance(engine, max_share=0.5)


def test_an_engine_can_be_asked(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    with Engine(model, tokenizer) as engine:
        predictions = PerceptionInAdvance(engine, form="announced").predict([[30, 40], [50]])
    assert len(predictions) == 2
