"""What an answer costs, before and after: estimates and prices."""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage

from sot_chains import Limits, Price
from sot_chains.calls import usage
from sot_chains.calls.usage import (
    NO_TOKENS,
    Tokens,
    compute_cost,
    count_tokens,
    num_message_tokens,
    num_tokens,
    price_for,
    total_usage,
)
from tests.sot_chains.fakes import ANSWER, FakeProvider, sot_of

# --- estimates


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Any], None]]:
    """Sets what tiktoken loads, as in a new process whose cache has a file of that name."""
    load = tiktoken.get_encoding
    num_before = num_tokens("a" * 400)

    def provide(encoding: Any) -> None:
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
        url = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
        (tmp_path / hashlib.sha1(url.encode()).hexdigest()).touch()

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    usage.load_vocabulary.cache_clear()
    yield provide
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: None)
    usage.load_vocabulary.cache_clear()
    provide(None)
    usage.load_vocabulary()
    usage.load_vocabulary.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", load)
    assert num_tokens("a" * 400) == num_before


def test_offline_there_is_an_estimate_and_one_warning(
    vocabulary: Any, caplog: pytest.LogCaptureFixture
) -> None:
    begin = time.monotonic()  # the tests' network is loopback alone
    for _ in range(20):
        usage.load_vocabulary()
    assert time.monotonic() - begin < 5
    assert num_tokens("How do I sleep well?") == 5
    assert len(caplog.records) == 1
    assert "TIKTOKEN_CACHE_DIR" in caplog.text


async def test_with_a_vocabulary_control_tokens_in_a_question_are_text(vocabulary: Any) -> None:
    letters = {bytes([number]): number for number in range(256)}
    vocabulary(
        tiktoken.Encoding(
            "letters", pat_str=r".", mergeable_ranks=letters, special_tokens={"<|endoftext|>": 256}
        )
    )
    usage.load_vocabulary()
    assert num_tokens("<|endoftext|>") == 13
    sot = sot_of(FakeProvider(), limits=Limits(tokens_per_minute=100_000))
    assert (await sot.ainvoke("What does <|endoftext|> mean?")).text == ANSWER


@given(st.text())
def test_an_estimate_is_never_nothing_for_something(text: str) -> None:
    assert 0 <= num_tokens(text) <= len(text) + 1
    assert bool(text) <= num_tokens(text)
    assert num_message_tokens([HumanMessage(text)]) > num_tokens(text)


# --- prices

COUNTED = Tokens(
    input_tokens=1000, output_tokens=100, cached_tokens=600, cache_write_tokens=100, cache_write_1h_tokens=0
)


def test_a_price() -> None:
    price = Price(input=2.0, output=10.0, cached_input=0.2, cache_write=2.5)
    assert price.of(COUNTED) * 1e6 == pytest.approx(300 * 2 + 600 * 0.2 + 100 * 2.5 + 100 * 10)
    assert Price(input=2.0, output=10.0).of(COUNTED) * 1e6 == pytest.approx(3000)
    cost = compute_cost({"points": COUNTED}, None, price)
    assert cost["price"] == price.of(COUNTED)
    assert cost["saved_by_cache"] == pytest.approx((3000 - 1970) / 1e6)


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
    assert count_tokens(total_usage([usage, None, usage])) == {
        "input_tokens": 18,
        "output_tokens": 2,
        "cached_tokens": 8,
        "cache_write_tokens": 0,
        "cache_write_1h_tokens": 0,
    }
    assert count_tokens(total_usage([])) == NO_TOKENS
