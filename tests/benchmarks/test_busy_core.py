"""The benchmark of a busy core, at the size of a toy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.busy_core import main
from tests.tiny import tiny_chat_model, tiny_tokenizer


def test_both_speeds_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    main(["--model", str(tmp_path), "--max-tokens", "4", "--repeats", "1"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["busy_tokens_per_second"] > 0
    assert figures["quiet_tokens_per_second"] > 0
    assert figures["threads"] >= 1
