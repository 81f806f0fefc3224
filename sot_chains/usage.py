"""What an answer costs: tokens by stage, money, and how much of both a plain answer would have taken.

Counts are the server's wherever it reported any. Calls that were cut before their usage arrived, or whose
server does not count, are estimated and stand apart. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from langchain_core.messages.ai import UsageMetadata

_MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    """What a model costs, in any currency, per million tokens.

    Attributes:
        input: Tokens read.
        output: Tokens written.
        cached_input: Tokens read from the vendor's cache; by default as dear as any.
        cache_write: Tokens written to it; by default as dear as any read.
    """

    input: float
    output: float
    cached_input: float | None = None
    cache_write: float | None = None

    def of(self, tokens: Tokens) -> float:
        """What ``tokens`` cost."""
        cached, written = tokens["cached_tokens"], tokens["cache_write_tokens"]
        plain = tokens["input_tokens"] - cached - written
        read_price = self.input if self.cached_input is None else self.cached_input
        write_price = self.input if self.cache_write is None else self.cache_write
        return (
            plain * self.input
            + cached * read_price
            + written * write_price
            + tokens["output_tokens"] * self.output
        ) / _MILLION


class Tokens(TypedDict):
    """Tokens read and written. Those from the cache and into it are among those read."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cache_write_tokens: int


class Overhead(TypedDict):
    """What the answer took beside a plain one, which would have read the question once.

    Attributes:
        plain_input_tokens: What a plain answer would have read; an estimate.
        input_ratio: Tokens read over that: the question and the outline are read with every point.
        output_ratio: Tokens written over those of the points alone, so 1 and the skeleton's share.
        price_ratio: What was paid over what a plain answer of the same text would have cost.
    """

    plain_input_tokens: int
    input_ratio: float
    output_ratio: float
    price_ratio: float | None


class Cost(TypedDict):
    """What was spent on an answer.

    Attributes:
        stages: Tokens the server reported, by stage: ``skeleton``, ``points``, ``plain``.
        reported: Their sum, to the token.
        estimated: What calls took that were cut before their usage arrived; ``None`` if there were none.
        price: What all of it costs by the table of prices; ``None`` where the model is not in it.
        saved_by_cache: What reading from the cache saved of that, less what writing to it cost more.
        overhead: Over a plain answer; ``None`` on the plain route or where nothing was reported.
    """

    stages: dict[str, Tokens]
    reported: Tokens
    estimated: Tokens | None
    price: float | None
    saved_by_cache: float | None
    overhead: Overhead | None


NO_TOKENS = Tokens(input_tokens=0, output_tokens=0, cached_tokens=0, cache_write_tokens=0)


def tokens_of(usages: Iterable[UsageMetadata | None]) -> Tokens:
    """The sum of ``usages``."""
    num_in = num_out = cached = written = 0
    for usage in usages:
        if usage is None:
            continue
        num_in += usage["input_tokens"]
        num_out += usage["output_tokens"]
        if details := usage.get("input_token_details"):
            cached += details.get("cache_read") or 0
            written += details.get("cache_creation") or 0
    return Tokens(
        input_tokens=num_in, output_tokens=num_out, cached_tokens=cached, cache_write_tokens=written
    )


def added(one: Tokens, other: Tokens | None) -> Tokens:
    """The sum of two counts."""
    if other is None:
        return one
    return Tokens(
        input_tokens=one["input_tokens"] + other["input_tokens"],
        output_tokens=one["output_tokens"] + other["output_tokens"],
        cached_tokens=one["cached_tokens"] + other["cached_tokens"],
        cache_write_tokens=one["cache_write_tokens"] + other["cache_write_tokens"],
    )


def price_for(model: str, prices: Mapping[str, Price] | Price | None) -> Price | None:
    """The price of ``model``: by its name, or by the longest name in the table it begins with.

    Servers answer with dated names, such as ``gpt-4.1-mini-2025-04-14`` for ``gpt-4.1-mini``.
    """
    if prices is None or isinstance(prices, Price):
        return prices
    names = [name for name in prices if model == name or model.startswith(f"{name}-")]
    return prices[max(names, key=len)] if names else None


def cost_of(
    stages: Mapping[str, Tokens],
    estimated: Tokens | None,
    price: Price | None,
    plain_input_tokens: int | None,
) -> Cost:
    """Puts a cost together.

    Args:
        stages: What was reported, by stage.
        estimated: What is estimated of calls cut short.
        price: The model's price, if known.
        plain_input_tokens: What a plain answer would have read; ``None`` where there is nothing to compare.
    """
    reported = NO_TOKENS
    for tokens in stages.values():
        reported = added(reported, tokens)
    everything = added(reported, estimated)
    paid = price.of(everything) if price else None
    return Cost(
        stages=dict(stages),
        reported=reported,
        estimated=estimated,
        price=paid,
        saved_by_cache=price.of(_uncached(everything)) - paid if price and paid is not None else None,
        overhead=_overhead(stages, everything, price, plain_input_tokens),
    )


def _uncached(tokens: Tokens) -> Tokens:
    return Tokens(
        input_tokens=tokens["input_tokens"],
        output_tokens=tokens["output_tokens"],
        cached_tokens=0,
        cache_write_tokens=0,
    )


def _overhead(
    stages: Mapping[str, Tokens], everything: Tokens, price: Price | None, plain_input_tokens: int | None
) -> Overhead | None:
    num_out = stages["points"]["output_tokens"] if "points" in stages else 0
    if not plain_input_tokens or not num_out:
        return None
    plain = Tokens(
        input_tokens=plain_input_tokens, output_tokens=num_out, cached_tokens=0, cache_write_tokens=0
    )
    plain_price = price.of(plain) if price else 0.0
    return Overhead(
        plain_input_tokens=plain_input_tokens,
        input_ratio=everything["input_tokens"] / plain_input_tokens,
        output_ratio=everything["output_tokens"] / num_out,
        price_ratio=price.of(everything) / plain_price if price and plain_price else None,
    )
