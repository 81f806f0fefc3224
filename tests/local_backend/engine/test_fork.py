"""A child made by ``os.fork`` answers, or gets an error at once, whatever the parent did when it forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_answers_or_gets_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.local_backend.engine.forked"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    told: dict[str, dict[str, list[str]]] = {}
    state = ""
    for line in done.stdout.splitlines():
        who, _, text = line.partition(": ")
        if who == "state":
            state = text
        else:
            told.setdefault(state, {}).setdefault(who, []).append(text)
    answer = told["idle"]["parent"][0]
    for said in told.values():
        assert set(said["parent"]) == {answer}
    assert told["idle"]["child"] == [answer] * 3
    assert told["busy"]["child"] == [answer] * 4
    assert told["locked"]["child"] == [answer]
    error, after = told["streaming"]["child"]
    assert "this row is written in the process that was forked" in error
    assert after == answer
    error, nothing, closed = told["closed"]["child"]
    assert "the engine is closed" in error
    assert (nothing, closed) == ("None", answer)
