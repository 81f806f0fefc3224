"""The benchmark of a step's cost, at the size of a toy."""

from __future__ import annotations

import json

import pytest

from benchmarks.step_overhead import SETTINGS, main


def test_every_setting_is_timed_for_every_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "1", "3", "--tokens", "3", "--repeats", "1", "--vocabulary", "300", "--device", "cpu"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["device"] == "cpu"
    assert results["rows"].keys() == {"1", "3"}
    for figures in results["rows"].values():
        assert figures.keys() == SETTINGS.keys()
        assert figures["greedy"]["over_greedy"] == 1
        assert all(each["step_us"] > each["host_us"] > 0 for each in figures.values())
