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
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from sot_chains import Budget, BudgetError, Price
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
from tests.sot_chains.fakes import ANSWER, QUESTION, sot_of
from tests.sot_chains.faulty import FaultyProvider, what

# --- estimates


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    usage.fetch_vocabulary.cache_clear()
    monkeypatch.setattr(usage, "_encoding", None)
    monkeypatch.setattr(usage, "_has_warned", False)
    yield
    if usage.fetch_vocabulary.cache_info().currsize:
        usage.fetch_vocabulary()[0].result(10)
        usage.fetch_vocabulary.cache_clear()


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
    sot = sot_of(FaultyProvider(), budget=Budget(tokens=100_000))
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


def provider(num_points: int = 8) -> FaultyProvider:
    def answer(messages: Sequence[BaseMessage]) -> str:
        if what(messages) == "outline":
            return "\n".join(f"{number}. Point number {number}" for number in range(1, num_points + 1))
        return "Yes."

    return FaultyProvider(answer=answer, usage=None)


@pytest.mark.usefixtures("forgotten")
async def test_a_budget_that_is_large_enough_changes_nothing() -> None:
    sot = sot_of(FaultyProvider(), budget=Budget(tokens=10_000))
    for _ in range(3):  # each answer has all of it
        message = await sot.ainvoke(QUESTION)
        assert message.text == ANSWER
        assert message.response_metadata["sot"]["is_complete"]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("eager", [False, True])
async def test_the_smaller_the_budget_the_fewer_points(eager: bool) -> None:
    written = []
    for allowed in (800, 1200, 2200, 20_000):
        asked = provider()
        sot = sot_of(asked, budget=Budget(tokens=allowed), eager=eager)
        trace = (await sot.ainvoke(QUESTION)).response_metadata["sot"]
        statuses = [point["status"] for point in trace["points"]]
        num_whole = statuses.count("complete")
        # Those that fit are the first ones, and the trace says why the others are missing.
        assert statuses == ["complete"] * num_whole + ["failed"] * (8 - num_whole)
        assert all("the budget is too small for point_" in failure["reason"] for failure in trace["failures"])
        assert len(asked.requests) == trace["num_requests"] == 1 + num_whole
        assert sum(num_tokens(request) for request in asked.requests) <= allowed
        written.append(num_whole)
    assert 0 < written[0] < written[1] < written[2] < written[3] == 8


@pytest.mark.usefixtures("forgotten")
async def test_a_budget_refuses_before_it_spends() -> None:
    asked = provider()
    with pytest.raises(BudgetError, match=r"too small for skeleton: about \d+ tokens with 100 left"):
        await sot_of(asked, budget=Budget(tokens=100)).ainvoke(QUESTION)
    assert not asked.requests
    with pytest.raises(BudgetError, match="too small for point_8") as caught:
        await sot_of(asked, budget=Budget(tokens=300)).ainvoke(QUESTION)
    assert len(asked.requests) == 1
    assert caught.value.trace is not None  # to go on from with a larger one
    message = await sot_of(asked).ainvoke(QUESTION, resume=caught.value.trace)
    assert message.response_metadata["sot"]["is_complete"]
    assert len(asked.requests) == 9


@pytest.mark.usefixtures("forgotten")
async def test_money_and_a_budget_for_all_answers_together() -> None:
    prices = {"faulty": Price(input=1.0, output=1.0)}
    budget = Budget(price=0.002, scope="total")
    slow = FaultyProvider()
    slow.pause = lambda asked, _: 0.05  # so that they are written at the same time
    sot = sot_of(slow, prices=prices, budget=budget)
    results = await asyncio.gather(*(sot.ainvoke(QUESTION) for _ in range(5)), return_exceptions=True)
    whole = [r for r in results if isinstance(r, AIMessage) and r.response_metadata["sot"]["is_complete"]]
    assert 0 < len(whole) < 5
    # What was reserved and not used is available again: usage was far less than estimated.
    assert (await sot.ainvoke(QUESTION)).text == ANSWER
    with pytest.raises(ValueError, match="needs the price of 'faulty'"):
        sot_of(provider(), budget=budget)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("policy", ["retry", "plain", "raise"])
async def test_a_call_that_is_not_sent_costs_nothing(policy: Any) -> None:
    budget = Budget(tokens=2000, scope="total")
    waiting = FaultyProvider(pause=lambda asked, _: 10.0 * (asked != "outline"))
    sot = sot_of(waiting, budget=budget, on_failure=policy)
    task = asyncio.create_task(sot.ainvoke(QUESTION, {"max_concurrency": 1}))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(waiting.requests) == 2  # the others wait for a place
    outline, point = 15, num_message_tokens([HumanMessage(waiting.requests[1])])
    assert budget._spent_tokens == outline + point


def tokens_in(number: int) -> Tokens:
    return Tokens(input_tokens=number, output_tokens=0, cached_tokens=0, cache_write_tokens=0)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=20))
def test_accounts_never_give_more_than_the_budget(calls: list[tuple[int, int]]) -> None:
    budget = Budget(tokens=500, scope="total")
    accounts = [BudgetAccount(budget, None), BudgetAccount(budget, None)]
    held = 0
    for number, (expected, used) in enumerate(calls):
        account = accounts[number % 2]
        try:
            account.reserve(tokens_in(expected), "a call")
        except BudgetError:
            assert held + expected > 500
        else:
            account.correct(tokens_in(expected), tokens_in(min(used, expected)))
            held += min(used, expected)
        assert held <= 500


@pytest.mark.parametrize(
    "wrong",
    [{}, {"tokens": 0}, {"price": -1.0}, {"tokens": 1, "scope": "day"}],
)
def test_budgets_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"budget|scope"):
        Budget(**wrong)
