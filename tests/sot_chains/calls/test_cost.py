"""What an answer costs, before and after: estimates, prices, budgets."""

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage, HumanMessage

from sot_chains import Budget, BudgetError, Price, SkeletonOfThought
from sot_chains.calls import usage
from sot_chains.calls.budget import BudgetAccount
from sot_chains.calls.usage import (
    NO_TOKENS,
    Tokens,
    cost_of,
    num_message_tokens,
    num_tokens,
    price_for,
    tokens_of,
)
from tests.sot_chains.answering.test_schedules import several
from tests.sot_chains.fakes import ANSWER, PLAIN, QUESTION
from tests.sot_chains.faulty import FaultyProvider, what

# --- estimates


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    for name, value in (("_encoding", None), ("_loading", None), ("_has_warned", False)):
        monkeypatch.setattr(usage, name, value)
    yield
    if usage._loading:
        usage._loading[0].result(10)


@pytest.mark.usefixtures("forgotten")
async def test_offline_there_is_an_estimate_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def offline(name: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with caplog.at_level(logging.WARNING, logger="sot_chains"):
        await asyncio.gather(*(usage.vocabulary() for _ in range(20)))
        assert num_tokens("How do I sleep well?") == 5
    assert len(caplog.records) == 1
    assert "TIKTOKEN_CACHE_DIR" in caplog.text


@pytest.mark.usefixtures("forgotten")
async def test_a_vocabulary_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: release.wait(20) and None)
    monkeypatch.setattr(usage, "_LONGEST_WAIT_SECONDS", 0.05)
    async with asyncio.timeout(5):
        for _ in range(10):
            await usage.vocabulary()
    release.set()
    assert "not arrived yet" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("forgotten")
async def test_with_a_vocabulary_control_tokens_in_a_question_are_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = {bytes([number]): number for number in range(256)}
    encoding = tiktoken.Encoding(
        "letters", pat_str=r".", mergeable_ranks=letters, special_tokens={"<|endoftext|>": 256}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    await usage.vocabulary()
    assert num_tokens("<|endoftext|>") == 13
    sot = SkeletonOfThought(FaultyProvider(), budget=Budget(tokens=100_000))
    assert (await sot.ainvoke("What does <|endoftext|> mean?")).text == ANSWER


@pytest.mark.usefixtures("forgotten")
@given(st.text())
def test_an_estimate_is_never_nothing_for_something(text: str) -> None:
    assert 0 <= num_tokens(text) <= len(text) + 1
    assert bool(text) <= num_tokens(text)
    assert num_message_tokens([HumanMessage(text)]) > num_tokens(text)


# --- prices

COUNTED = Tokens(input_tokens=1000, output_tokens=100, cached_tokens=600, cache_write_tokens=100)


def test_a_price() -> None:
    price = Price(input=2.0, output=10.0, cached_input=0.2, cache_write=2.5)
    assert price.of(COUNTED) * 1e6 == pytest.approx(300 * 2 + 600 * 0.2 + 100 * 2.5 + 100 * 10)
    assert Price(input=2.0, output=10.0).of(COUNTED) * 1e6 == pytest.approx(3000)
    cost = cost_of({"points": COUNTED}, None, price, 100)
    assert cost["saved_by_cache"] == pytest.approx((3000 - 1970) / 1e6)
    assert cost["overhead"] == {
        "plain_input_tokens": 100,
        "input_ratio": 10.0,
        "output_ratio": 1.0,
        "price_ratio": pytest.approx(1970 / 1200),
    }


def test_which_price() -> None:
    prices = {"m": Price(1, 1), "m-large": Price(2, 2)}
    assert price_for("m-large-2026-01-01", prices) == Price(2, 2)
    assert price_for("m-small", prices) == Price(1, 1)
    assert price_for("n", prices) is None
    assert price_for("anything", Price(3, 3)) == Price(3, 3)
    assert price_for("anything", None) is None


def test_counts_of_a_cache_are_among_those_read() -> None:
    usage: Any = {
        "input_tokens": 9,
        "output_tokens": 1,
        "total_tokens": 10,
        "input_token_details": {"cache_read": 4},
    }
    assert tokens_of([usage, None, usage]) == {
        "input_tokens": 18,
        "output_tokens": 2,
        "cached_tokens": 8,
        "cache_write_tokens": 0,
    }
    assert tokens_of([]) == NO_TOKENS


# --- budgets


def provider(num_points: int = 3) -> FaultyProvider:
    def answer(messages: Sequence[BaseMessage]) -> str:
        if what(messages) == "outline" and num_points > 3:
            return "\n".join(f"{number}. Point number {number}" for number in range(1, num_points + 1))
        text = str(messages[-1].text)
        if num_points > 3 and "Your point" in text:
            lines = text.rpartition("Your points are:\n")[2].partition("\n\n")[0].splitlines()
            return "\n".join(f"{line}: Yes." for line in lines) if "Your points" in text else "Yes."
        return several(messages)

    return FaultyProvider(answer=answer)


@pytest.mark.usefixtures("forgotten")
async def test_a_budget_that_is_large_enough_changes_nothing() -> None:
    for when_short in ("degrade", "refuse"):
        sot = SkeletonOfThought(provider(), budget=Budget(tokens=10_000, when_short=when_short))  # type: ignore[arg-type]  # one of its literals
        for _ in range(3):  # for each answer anew
            message = await sot.ainvoke(QUESTION)
            assert message.text == ANSWER
            assert len(message.response_metadata["sot"]["points"]) == 3


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("tokens_allowed", [600, 900, 1200, 1600, 2200, 3000, 5000, 9000])
async def test_a_budget_degrades_before_it_spends(tokens_allowed: int) -> None:
    asked = provider(num_points=8)
    sot = SkeletonOfThought(asked, budget=Budget(tokens=tokens_allowed))
    message = await sot.ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert trace["is_complete"]
    sent = sum(num_tokens(request) for request in asked.requests)
    assert sent <= tokens_allowed
    if trace["route"] == "plain":
        assert message.text == PLAIN
        assert "budget" in trace["route_reason"]
    elif trace["num_calls"] < 9:
        assert "for the budget" in trace["route_reason"]


@pytest.mark.usefixtures("forgotten")
async def test_the_smaller_the_budget_the_less_is_done() -> None:
    requests = []
    for allowed in (600, 2000, 20_000):
        asked = provider(num_points=8)
        await SkeletonOfThought(asked, budget=Budget(tokens=allowed)).ainvoke(QUESTION)
        requests.append(len(asked.requests))
    assert requests[0] <= requests[1] < requests[2] == 9


@pytest.mark.usefixtures("forgotten")
async def test_a_budget_refuses_before_it_spends() -> None:
    asked = provider()
    sot = SkeletonOfThought(asked, budget=Budget(tokens=500, when_short="refuse"))
    with pytest.raises(
        BudgetError, match=r"too small for an outline and its points: about \d+ tokens with 500 left"
    ):
        await sot.ainvoke(QUESTION)
    assert not asked.requests
    with pytest.raises(BudgetError, match="too small for a plain answer"):
        await SkeletonOfThought(asked, budget=Budget(tokens=10)).ainvoke(QUESTION)
    assert not asked.requests


@pytest.mark.usefixtures("forgotten")
async def test_money_and_a_budget_for_all_answers_together() -> None:
    prices = {"faulty": Price(input=1.0, output=1.0)}
    budget = Budget(price=0.004, scope="total", when_short="refuse")
    slow = provider()
    slow.pause = lambda asked, _: 0.05  # so that they are written at the same time
    sot = SkeletonOfThought(slow, prices=prices, budget=budget)
    results = await asyncio.gather(*(sot.ainvoke(QUESTION) for _ in range(5)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, BudgetError)]
    assert 0 < len(refused) < 5
    # What was set aside and not used is there again: usage was far less than estimated.
    assert (await sot.ainvoke(QUESTION)).text == ANSWER
    with pytest.raises(ValueError, match="needs the price of 'faulty'"):
        SkeletonOfThought(provider(), budget=budget)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=20))
def test_a_purse_never_gives_more_than_the_budget(calls: list[tuple[int, int]]) -> None:
    budget = Budget(tokens=500, scope="total")
    purses = [BudgetAccount(budget, None), BudgetAccount(budget, None)]
    held = 0
    for number, (expected, used) in enumerate(calls):
        asked, taken = ({**NO_TOKENS, "input_tokens": tokens_} for tokens_ in (expected, min(used, expected)))
        purse = purses[number % 2]
        if purse.reserve(Tokens(**asked)):  # type: ignore[typeddict-item]  # spread out of one
            purse.correct(Tokens(**asked), Tokens(**taken))  # type: ignore[typeddict-item]  # likewise
            held += min(used, expected)
        assert held <= 500


@pytest.mark.parametrize(
    "wrong",
    [{}, {"tokens": 0}, {"price": -1.0}, {"tokens": 1, "when_short": "beg"}, {"tokens": 1, "scope": "day"}],
)
def test_budgets_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"budget|when_short|scope"):
        Budget(**wrong)
