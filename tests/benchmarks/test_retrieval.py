"""The retrieval benchmark counts and compares as it says; how fast anything is, no test asks."""

from __future__ import annotations

import json

import pytest

from benchmarks import retrieval


def case(ours: float, greedy: float, *, identical: bool = True) -> dict[str, object]:
    seconds = {
        "reference_copy": ours,
        "autoregressive": 2.0,
        "transformers_greedy": greedy,
        "prompt_lookup": 1.5,
    }
    return {
        "num_tokens": 30,
        "repeats_itself": False,
        "num_forwards": 10,
        "num_citations": 1,
        "literal": True,
        "identical": identical,
        "identical_to_transformers": True,
        "decode_seconds": seconds,
        "end_to_end_seconds": {name: value + 1 for name, value in seconds.items()},
    }


def test_times_are_added_up_before_they_are_compared() -> None:
    figures = retrieval.summarize([case(1.0, 4.0), case(3.0, 4.0)])
    assert figures["tokens_per_forward"] == 3.0
    assert figures["speedup_vs_transformers_greedy"] == 2.0
    assert figures["speedup_vs_own_autoregressive"] == 1.0
    assert figures["speedup_vs_prompt_lookup"] == 0.75
    assert figures["speedup_vs_transformers_greedy_end_to_end"] == round(10 / 6, 3)
    assert figures["identical"] is True
    assert retrieval.summarize([case(1.0, 4.0), case(1.0, 4.0, identical=False)])["identical"] is False


def test_answers_that_never_end_are_no_gain() -> None:
    """One word said for ever is easy to copy."""
    endless = {**case(0.1, 40.0), "repeats_itself": True}
    figures = retrieval.summarize([case(1.0, 4.0), endless, case(3.0, 4.0)])
    assert figures["speedup_vs_transformers_greedy"] == 2.0
    assert (figures["cases"], figures["repeat_themselves"]) == (3, 1)
    with pytest.raises(ValueError, match="all of 1 answers repeat"):
        retrieval.summarize([endless])


@pytest.mark.slow
def test_one_case_of_each_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    retrieval.main(["--cases", "1", "--repeats", "1", "--max-tokens", "24"])
    scenarios = json.loads(capsys.readouterr().out.splitlines()[-1])["scenarios"]
    assert set(scenarios) == {"documents", "similar_answers", "earlier_turns"}
    for figures in scenarios.values():
        assert figures["identical"]
        assert figures["citations_literal"]
        assert figures["tokens_per_forward"] >= 1
