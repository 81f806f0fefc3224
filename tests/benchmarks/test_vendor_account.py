"""The rules of the server that benchmarks and tests ask in place of a vendor's."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.vendor_account import (
    ANTHROPIC,
    OPENAI,
    OPENAI_EARLIER,
    Prompt,
    PromptCache,
    RateLimits,
    Terms,
    total,
)

_LONG = "What stands in the documents. " * 400  # some 3,000 tokens


def _prompt(terms: Terms, tail: str, *, ttl: str | None = None, long: str = _LONG, **fields: Any) -> Prompt:
    mark: dict[str, Any] = {"type": "ephemeral"} if terms.wire == "anthropic" else {"mode": "explicit"}
    name = "cache_control" if terms.wire == "anthropic" else "prompt_cache_breakpoint"
    shared = {"type": "text", "text": long, name: mark | ({"ttl": ttl} if ttl else {})}
    content = [shared, {"type": "text", "text": tail}]
    options = {"prompt_cache_options": {"mode": "explicit"}} if terms == OPENAI else {}
    return Prompt.of(
        {"model": "m", "messages": [{"role": "user", "content": content}], **options, **fields}, terms
    )


@pytest.mark.parametrize("terms", [OPENAI, ANTHROPIC])
def test_a_prefix_is_read_once_the_response_that_writes_it_has_begun(terms: Terms) -> None:
    cache = PromptCache(terms)
    first = cache.charge(_prompt(terms, "one"), 0.0)
    beside = cache.charge(_prompt(terms, "two"), 0.1)
    assert first.cache_write_tokens == beside.cache_write_tokens > 2_000  # both write
    first.begin()
    after = cache.charge(_prompt(terms, "three"), 0.2)
    assert (after.cached_tokens, after.cache_write_tokens) == (first.cache_write_tokens, 0)
    assert cache.charge(_prompt(terms, "four"), 1e6).cached_tokens == 0  # it has expired
    assert cache.charge(_prompt(terms, "five", tools=[{}]), 0.3).cached_tokens == 0
    assert total([first, after])["input_tokens"] == first.input_tokens + after.input_tokens


def test_short_prefixes_are_not_cached_and_an_hour_costs_more() -> None:
    short = PromptCache(ANTHROPIC).charge(_prompt(ANTHROPIC, "one", long="short " * 100), 0.0)
    assert short.cache_write_tokens == 0
    hour = PromptCache(ANTHROPIC).charge(_prompt(ANTHROPIC, "one", ttl="1h"), 0.0)
    assert hour.cache_write_1h_tokens == hour.cache_write_tokens > 0
    assert hour.input_cost() > PromptCache(ANTHROPIC).charge(_prompt(ANTHROPIC, "one"), 0.0).input_cost()
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(ValueError, match="maximum of 4"):
        Prompt.of({"model": "m", "messages": [{"role": "user", "content": [marked] * 5}]}, ANTHROPIC)


def test_earlier_models_read_what_another_request_began_with() -> None:
    cache = PromptCache(OPENAI_EARLIER)
    first = cache.charge(_prompt(OPENAI_EARLIER, "one"), 0.0)
    first.begin()
    after = cache.charge(_prompt(OPENAI_EARLIER, "two"), 0.1)
    assert first.cache_write_tokens == after.cache_write_tokens == 0  # writing is free
    assert after.cached_tokens % 128 == 0
    assert 0.9 * first.input_tokens < after.cached_tokens <= first.input_tokens


def test_a_key_is_good_for_fifteen_requests_a_minute() -> None:
    cache = PromptCache(OPENAI)
    reads = []
    for number in range(17):
        charge = cache.charge(_prompt(OPENAI, "one", prompt_cache_key="k"), float(number))
        charge.begin()
        reads.append(charge.cached_tokens > 0)
    assert reads == [False, *[True] * 14, False, True]


def test_each_limit_is_one_of_a_window() -> None:
    limits = RateLimits(requests=3, input_tokens=100, output_tokens=50, window_seconds=1.0)
    limits.spend(0.0, requests=1, input_tokens=90)
    assert limits.refused(0.1, 10) is None
    refused = limits.refused(0.1, 11)
    assert refused is not None
    assert refused == ("input_tokens", pytest.approx(0.9))
    limits.spend(0.2, output_tokens=50)
    assert (limits.refused(0.3, 1) or ("",))[0] == "output_tokens"
    assert limits.headers(0.3, "anthropic")["anthropic-ratelimit-output-tokens-remaining"] == "0"
    assert limits.headers(0.3, "openai")["x-ratelimit-remaining-input-tokens"] == "10"
    assert limits.refused(1.3, 100) is None
