"""The agent that the benchmark and the notebook ask, on a small model of random weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import agents
from benchmarks.agents import FOR_POINTS, FOR_TOOLS, TOOLS, CallsByRule, measure
from sot_chains.middleware import SkeletonMiddleware
from tests.tiny import tiny_chat


@pytest.fixture(scope="module")
def cases() -> list[list[dict[str, Any]]]:
    """Without points and with them; random weights write no outline, so that answers are plain there, too."""
    with tiny_chat() as chat:
        model = CallsByRule(engine=chat.engine, model_name="tiny", max_tokens=8)
        return [measure(model), measure(model, SkeletonMiddleware())]


def test_questions_for_tools_are_calls_and_others_are_not(cases: list[list[dict[str, Any]]]) -> None:
    for of_one in cases:
        assert [one["question"] for one in of_one] == [*FOR_TOOLS, *FOR_POINTS]
        assert [len(one["calls"]) for one in of_one] == [1] * len(FOR_TOOLS) + [0] * len(FOR_POINTS)
        assert all(one["streamed_is_final"] for one in of_one)
    calls = [[one["calls"] for one in of_one] for of_one in cases]
    assert calls[0] == calls[1]
    assert {name for (name, _), *_ in filter(None, calls[0])} == {tool.name for tool in TOOLS}


def test_it_prints_its_figures_last(
    cases: list[list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, points = cases
    monkeypatch.setattr(agents, "measure", lambda model, *middleware: points if middleware else plain)
    monkeypatch.setattr(CallsByRule, "from_pretrained", lambda *args, **options: tiny_chat())
    agents.main([])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["questions"], figures["same_calls"], figures["for_tools_with_a_call"]) == (10, 10, 5)
    assert figures["streamed_is_final"] == 10
