"""The judge: what it is asked, what its replies are taken for, and what follows from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableLambda

from sot_chains.evaluation import CRITERIA, GENERAL, Evaluation, Judge, Question, Store
from sot_chains.evaluation.judge import Comparison, make_request, read_verdict
from sot_chains.evaluation.run import NetWinRate, QuestionResult
from sot_chains.providers.errors import Retries
from tests.sot_chains.evaluation.judges import always_first, answers_in, leans_to_the_first, prefers_longer
from tests.sot_chains.fakes import FakeProvider

PAIRS = [(f"ours {'very ' * (number % 3)}{number}", f"theirs {number}") for number in range(20)]
Reply = Callable[[Sequence[BaseMessage]], str]


async def _compared(reply: Reply, pairs: Sequence[tuple[str, str]], folder: Path) -> list[Comparison]:
    with Store(folder / "store") as store:
        judge = Judge(FakeProvider(answer=reply), store=store)
        return [await judge.compare(GENERAL, "Why?", ours, other) for ours, other in pairs]


def _health(comparisons: Sequence[Comparison]) -> dict[str, float]:
    question = Question("Why?", "all", "1")
    results = [QuestionResult(question, {}, comparisons={GENERAL: one}) for one in comparisons]
    return Evaluation({"a model": results}, "judge").health


async def test_a_judge_that_always_prefers_the_first_gives_no_net_win_but_is_found_out(
    tmp_path: Path,
) -> None:
    comparisons = await _compared(always_first, PAIRS, tmp_path)
    rate = NetWinRate.of([score for one in comparisons if (score := one.score) is not None])
    assert (rate.net, rate.low, rate.high) == (0.0, 0.0, 0.0)
    assert (rate.num_wins, rate.num_ties, rate.num_losses) == (0, len(PAIRS), 0)
    assert _health(comparisons)["position_bias"] == 1.0


@pytest.mark.parametrize("judge", [prefers_longer, leans_to_the_first])
async def test_a_planted_better_answer_wins(judge: Reply, tmp_path: Path) -> None:
    planted = [(f"{other} and more", other) for _, other in PAIRS]
    rate = NetWinRate.of([one.score or 0.0 for one in await _compared(judge, planted, tmp_path / "won")])
    assert rate.num_losses == 0
    assert rate.num_wins > rate.num_ties
    assert 0 < rate.low <= rate.net <= rate.high
    swapped = [(other, ours) for ours, other in planted]
    assert (
        NetWinRate.of([one.score or 0.0 for one in await _compared(judge, swapped, tmp_path / "lost")]).net
        == -rate.net
    )


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ("Both fine.\nVERDICT: 1", "first"),
        ("VERDICT: **2**", "second"),
        ("verdict: Tie", "tie"),
        ("**VERDICT:** Answer 2", "second"),
        ("The first would be VERDICT: 1, but it errs.\nVERDICT: 2", "second"),
        ("Number 1 is better.", "unreadable"),
        ("VERDICT: 3", "unreadable"),
        ("VERDICT: 12", "unreadable"),
        ("", "unreadable"),
        ("I'm sorry, but I can't compare these.", "unreadable"),
    ],
)
def test_only_a_readable_verdict_is_one(reply: str, outcome: str) -> None:
    assert read_verdict(reply) == outcome


@given(st.text())
def test_any_reply_is_read_as_something(reply: str) -> None:
    assert read_verdict(reply) in ("first", "second", "tie", "unreadable")


async def _never(messages: Sequence[BaseMessage]) -> str:
    await asyncio.sleep(60)
    return "VERDICT: TIE"


def _breaks(messages: Sequence[BaseMessage]) -> str:
    raise ConnectionError("gone")


@pytest.mark.parametrize(
    ("model", "outcome"),
    [
        (FakeProvider(answer=lambda messages: "bla"), "unreadable"),
        (FakeProvider(answer=_breaks), "failed"),
        (RunnableLambda(_breaks, afunc=_never), "failed"),
    ],
)
async def test_what_is_no_verdict_is_counted_and_never_a_tie(
    model: object, outcome: str, tmp_path: Path
) -> None:
    with Store(tmp_path / "store") as store:
        once = Retries(max_attempts=1)
        judge = Judge(model, store=store, label="broken", timeout_seconds=0.2, retries=once)  # type: ignore[arg-type]  # of both kinds
        comparison = await judge.compare(GENERAL, "Why?", "ours", "theirs")
        # Replies are kept; what failed is asked again by the next run.
        assert len(store._values) == (2 if outcome == "unreadable" else 0)
    assert comparison == Comparison(outcome, outcome)  # type: ignore[arg-type]  # one of them
    assert comparison.score is None
    health = _health([comparison])
    counts = {"unreadable": health["num_unreadable"], "failed": health["num_failed"]}
    assert counts == {kind: 2 * (kind == outcome) for kind in counts}


@pytest.mark.parametrize("failure", ["unreadable", "failed"])
def test_one_verdict_of_two_does_not_count(failure: str) -> None:
    assert Comparison("first", failure).score is None  # type: ignore[arg-type]  # one of them


def test_requests_show_both_answers_whatever_is_in_them() -> None:
    ours, other = "{second} {0} </answer_1> \\1", "<question>{criterion}"
    for criterion in CRITERIA:
        request = make_request(criterion, "What is {first}?", ours, other)
        assert f"<answer_1>\n{ours}\n</answer_1>" in request
        assert f"<answer_2>\n{other}\n</answer_2>" in request
        assert "What is {first}?" in request
        for aspect in CRITERIA[1:]:
            assert (aspect.capitalize() + ":" in request) == (aspect == criterion)
    with pytest.raises(ValueError, match="criterion"):
        make_request("beauty", "Why?", ours, other)


async def test_what_was_judged_once_is_not_asked_again(tmp_path: Path) -> None:
    num_asked = 0

    def reply(messages: Sequence[BaseMessage]) -> str:
        nonlocal num_asked
        num_asked += 1
        return prefers_longer(messages)

    first = await _compared(reply, PAIRS, tmp_path)
    assert num_asked == 2 * len(PAIRS)
    assert await _compared(reply, PAIRS, tmp_path) == first
    assert num_asked == 2 * len(PAIRS)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), max_size=30))
def test_a_net_win_rate_is_the_mean_and_lies_in_its_interval(scores: list[float]) -> None:
    rate = NetWinRate.of(scores)
    assert rate.low - 1e-9 <= rate.net <= rate.high + 1e-9
    assert rate.num_wins + rate.num_ties + rate.num_losses == len(scores)
    assert rate.net == pytest.approx(sum(scores) / len(scores) if scores else 0.0)
    assert NetWinRate.of([-score for score in scores]).net == -rate.net


@pytest.mark.parametrize("text", ["something else", "something else\n", '{"key": "a"}\n', "[1]\n"])
def test_a_file_that_is_no_store_is_refused_and_left_as_it_is(text: str, tmp_path: Path) -> None:
    (tmp_path / "store").write_text(text)
    with pytest.raises(ValueError, match="not a store"):
        Store(tmp_path / "store")
    assert (tmp_path / "store").read_text() == text


@pytest.mark.parametrize("num_torn", [1, 5, 12])
async def test_a_line_that_a_killed_process_left_unfinished_is_dropped(num_torn: int, tmp_path: Path) -> None:
    made = {"a": [1, "\u2028\ud83d"], "b": 2, "c": 3}
    num_made = 0

    async def kept(store: Store, name: str) -> object:
        async def make() -> object:
            nonlocal num_made
            num_made += 1
            return made[name]

        return await store.get_or_make(make, name=name)

    with Store(tmp_path / "store") as store:
        await kept(store, "a")
        await kept(store, "b")
    whole = (tmp_path / "store").read_bytes()
    (tmp_path / "store").write_bytes(whole + whole.splitlines()[-1][:num_torn])
    for _ in range(2):
        with Store(tmp_path / "store") as store:
            assert {name: await kept(store, name) for name in made} == made
            assert len(store._values) == num_made == 3


def test_answers_are_found_in_requests() -> None:
    from langchain_core.messages import HumanMessage

    assert answers_in([HumanMessage(make_request(GENERAL, "Why?", "a\nb", "c"))]) == ("a\nb", "c")
