"""``python -m benchmarks.load``: the paced API, the runs, and what is made of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.load import WAYS, PacedProvider, api_service, measure, picture, questions_of, run, summary
from sot_chains import SkeletonOfThought


@pytest.fixture
def provider() -> PacedProvider:
    return PacedProvider(seconds_per_token=0.0, first_token_seconds=0.0)


async def test_the_paced_api_writes_outlines_points_and_answers(provider: PacedProvider) -> None:
    message = await SkeletonOfThought(provider, router="always").ainvoke("How do I sleep?")
    trace = message.response_metadata["sot"]
    assert trace["route"] == "sot"
    assert 5 <= len(trace["points"]) <= 8
    again = await SkeletonOfThought(provider, router="always").ainvoke("How do I sleep?")
    assert again.text == message.text


async def test_every_question_that_arrives_is_answered(provider: PacedProvider) -> None:
    figures = await run(SkeletonOfThought(provider, router="always"), questions_of(20), 1000.0, seed=1)
    assert figures["share_of_sot"] == 1.0
    assert 0 < figures["median_seconds"] <= figures["p95_seconds"]
    assert figures["answers_per_second"] > 0


def test_every_method_is_measured_and_drawn() -> None:
    service = api_service([200.0], requests_per_window=40, window_seconds=0.5)
    cases = {case["way"]: case for case in measure(service, questions_of(12), repeats=1)}
    assert list(cases) == list(WAYS)
    assert cases["plain"]["share_of_sot"] == 0.0
    assert cases["sot"]["share_of_sot"] == 1.0
    assert picture(list(cases.values())).axes


def test_the_summary_finds_where_plain_is_sooner() -> None:
    medians = {1.0: (1.0, 0.5), 4.0: (1.2, 3.0)}
    cases: list[dict[str, Any]] = [
        {"service": "s", "rate": rate, "way": way, "median_seconds": seconds}
        for rate, of_ways in medians.items()
        for way, seconds in zip(("plain", "sot"), of_ways, strict=True)
    ]
    found = summary(cases)["s"]
    assert found["plain_is_sooner_from_rate"] == 4.0
    assert found["speed_up_by_rate"] == {"1.0": 2.0, "4.0": 0.4}
