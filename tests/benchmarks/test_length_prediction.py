"""``python -m benchmarks.length_prediction``: prompts, a log that is resumed, and the measured errors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.length_prediction import TASKS, main, measure, task_prompts, write_log
from benchmarks.length_training import LengthExample, read_lengths
from local_backend import Engine
from tests.tiny import tiny_tokenizer


@pytest.fixture
def engine() -> Engine:
    """A model that says nothing: quick."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    return Engine(LlamaForCausalLM(config).eval(), tokenizer)


def test_all_tasks_take_part_and_no_prompt_comes_twice(engine: Engine) -> None:
    with engine:
        prompts = task_prompts(engine, 40)
        assert prompts[:10] == task_prompts(engine, 10)
    assert {task for task, _ in prompts} == set(TASKS)
    assert len({tuple(prompt) for _, prompt in prompts}) == 40


def test_a_log_goes_on_behind_a_line_that_was_cut(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.length_prediction._MAX_TOKENS", 3)
    path = tmp_path / "log.jsonl"
    with engine:
        write_log(engine, path, 6, temperature=1.0)
        whole = path.read_text("utf-8")
        path.write_text(whole[: len(whole) * 2 // 3], encoding="utf-8")
        write_log(engine, path, 6, temperature=1.0)
        assert path.read_text("utf-8") == whole
        assert len(read_lengths(path, engine.tokenizer)) == 6


def test_every_way_is_measured_on_prompts_it_has_not_seen(engine: Engine) -> None:
    rng = random.Random(0)
    examples = [
        LengthExample((rng.choice((100, 200)), *rng.choices(range(300, 400), k=6)), rng.randint(5, 400))
        for _ in range(120)
    ]
    with engine:
        summary = measure(engine, examples)
    assert set(summary["predictors"]) == {"constant", "perception", "observed", "hidden_state"}
    assert all(figures["num_answers"] == 30 for figures in summary["predictors"].values())
    assert summary["pinball_under_constant"] < 0.2  # there is nothing to be learned here


def test_too_few_prompts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--prompts", "20"])
    assert "at least 100" in capsys.readouterr().err
