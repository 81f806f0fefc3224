"""The benchmark of bfloat16's next tokens, at the size of a toy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.half_precision import compare, main
from tests.tiny import tiny_chat_model, tiny_tokenizer


def test_both_ways_are_compared_with_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    main(["--model", str(tmp_path), "--prompts", "3", "--device", "cpu"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["prompts"] == 3
    for way in ("generate", "engine"):
        assert 0 <= figures[way]["agree"] <= 3
        assert 0 < figures[way]["kl"] < 0.1  # bfloat16 rounds, and no more


def test_agreement_and_divergence_are_those_of_distributions() -> None:
    exact = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert compare(exact, exact + 5.0) == {"agree": 2, "kl": 0.0}
    other = compare(exact, torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 2.0]]))
    assert other["agree"] == 1
    shares = exact[0].softmax(-1)
    assert other["kl"] == pytest.approx((shares[2] - shares[1]).item() / 2, abs=1e-5)
