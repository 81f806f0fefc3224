"""The cost of an answer: tokens by stage, and price.

Token counts are those the server reported. Calls whose usage did not arrive are estimated, and listed apart.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict, cast

from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage

_log = logging.getLogger(__name__)
_ENCODING = "o200k_base"  # OpenAI's models since 2024; a fair estimate for others
_HOST = "openaipublic.blob.core.windows.net"
_URL = f"https://{_HOST}/encodings/{_ENCODING}.tiktoken"
_LONGEST_WAIT_SECONDS = 3.0
_vocabulary: Any = None  # tiktoken's encoding
_MILLION = 1_000_000
_DETAILS = re.compile("^(priority|flex)_")


@dataclass(frozen=True)
class Price:
    """The price of a model per million tokens, in any currency.

    Attributes:
        input: Input tokens.
        output: Output tokens.
        cached_input: Input tokens read from the vendor's cache; by default the price of ``input``.
        cache_write: Input tokens written to the cache; by default the price of ``input``.
        cache_write_1h: Those written for an hour; by default the price of ``cache_write``.
        tiers: Prices of other tiers, by their names: ``fast``, ``flex``. By default the same.
    """

    input: float
    output: float
    cached_input: float | None = None
    cache_write: float | None = None
    cache_write_1h: float | None = None
    tiers: Mapping[str, Price] = field(default_factory=dict, hash=False)

    def of(self, tokens: Tokens, tier: str | None = None) -> float:
        """The price of ``tokens`` in a tier."""
        if other := self.tiers.get(tier_name(tier) or ""):
            return other.of(tokens)
        read = self.input if self.cached_input is None else self.cached_input
        write = self.input if self.cache_write is None else self.cache_write
        write_1h = write if self.cache_write_1h is None else self.cache_write_1h
        total = tokens["input_tokens"] * self.input + tokens["output_tokens"] * self.output
        total += tokens["cached_tokens"] * (read - self.input)
        total += tokens["cache_write_tokens"] * (write - self.input)
        total += tokens.get("cache_write_1h_tokens", 0) * (write_1h - write)
        return total / _MILLION


def tier_name(tier: str | None) -> str | None:
    """One name for one tier: OpenAI calls its fast one ``priority`` in replies."""
    return "fast" if tier == "priority" else tier


class Tokens(TypedDict):
    """Input tokens, some of them read from the cache or written to it (for an hour), and output tokens."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    cache_write_1h_tokens: int


class Cost(TypedDict):
    """What was spent on an answer."""

    stages: dict[str, Tokens]  # as the server reported them, by stage: "skeleton", "points", "plain"
    reported: Tokens  # their exact sum
    estimated: Tokens | None  # of calls whose usage did not arrive; None if there were none
    tiers: dict[str, Tokens]  # of these, those of other tiers than the standard one
    price: float | None  # of all these tokens; None if the model is not in the price table
    saved_by_cache: float | None  # by cache reads, minus the extra price of cache writes
    uncached_price: float | None  # of the same calls without a cache
    plain_price: float | None  # of one call that reads the prompt once and writes as much, without a cache


NO_TOKENS = cast("Tokens", dict.fromkeys(Tokens.__annotations__, 0))
_NO_CACHE: Any = {"cached_tokens": 0, "cache_write_tokens": 0, "cache_write_1h_tokens": 0}


def total_usage(usages: Iterable[UsageMetadata | None]) -> UsageMetadata | None:
    """The sum of ``usages``, ``None`` if none of them is known."""
    known = list(filter(None, usages))
    return reduce(add_usage, known) if known else None


def count_tokens(usage: UsageMetadata | None) -> Tokens:
    """``usage`` as counts."""
    if usage is None:
        return NO_TOKENS
    # LangChain's models put the tier before these names, and name writes by their lifetime.
    given = cast("Mapping[str, int | None]", usage.get("input_token_details") or {})
    counts = Counter[str]()
    for name, number in given.items():
        counts[_DETAILS.sub("", name)] += number or 0
    num_1h = counts["ephemeral_1h_input_tokens"]
    return Tokens(
        input_tokens=usage["input_tokens"],
        output_tokens=usage["output_tokens"],
        cached_tokens=counts["cache_read"],
        cache_write_tokens=counts["cache_creation"] + counts["ephemeral_5m_input_tokens"] + num_1h,
        cache_write_1h_tokens=num_1h,
    )


def as_usage(tokens: Tokens) -> UsageMetadata:
    """``tokens`` in LangChain's format."""
    num_in, num_out = tokens["input_tokens"], tokens["output_tokens"]
    return UsageMetadata(input_tokens=num_in, output_tokens=num_out, total_tokens=num_in + num_out)


def total_tokens(counts: Iterable[Tokens | None]) -> Tokens:
    """The sum of ``counts``."""
    known = list(filter(None, counts))
    return cast("Tokens", {name: sum(map(itemgetter(name), known)) for name in NO_TOKENS})


def price_for(model: str, prices: Mapping[str, Price] | Price | None) -> Price | None:
    """The price of ``model``: under its name, or under the longest name in the table that it starts with."""
    if prices is None or isinstance(prices, Price):
        return prices
    names = [name for name in prices if model == name or model.startswith(f"{name}-")]
    return prices[max(names, key=len)] if names else None


def compute_cost(
    stages: Mapping[str, Tokens],
    estimated: Tokens | None,
    price: Price | None,
    tiers: Mapping[str, Tokens] | None = None,
    plain: Tokens = NO_TOKENS,
) -> Cost:
    """Computes the cost of an answer, from the reported tokens by stage and those estimated."""
    reported, tiers = total_tokens(stages.values()), dict(tiers or {})
    everything, others = total_tokens((reported, estimated)), total_tokens(tiers.values())
    standard = cast("Tokens", {name: everything[name] - others[name] for name in NO_TOKENS})  # type: ignore[literal-required]  # names of the fields
    by_tier = [(None, standard), *tiers.items()]
    paid = uncached = plain_price = None
    if price:
        paid = sum(price.of(tokens, tier) for tier, tokens in by_tier)
        uncached = sum(price.of({**tokens, **_NO_CACHE}, tier) for tier, tokens in by_tier)
        plain_price = price.of(plain, next(iter(tiers), None))
    return Cost(
        stages=dict(stages),
        reported=reported,
        estimated=estimated,
        tiers=tiers,
        price=paid,
        saved_by_cache=None if uncached is None or paid is None else uncached - paid,
        uncached_price=uncached,
        plain_price=plain_price,
    )


_TOKENS_OF_A_MESSAGE = 4  # role and separators
_CHARACTERS_OF_A_TOKEN = 4.0


def num_tokens(text: str) -> int:
    """Estimates the tokens of ``text``. Control tokens in it count as ordinary text."""
    if _vocabulary is not None:
        return len(_vocabulary.encode_ordinary(text))
    # CJK text takes more tokens: about one per character.
    num_wide = 0 if text.isascii() else sum(ord(character) > 0x2E7F for character in text)
    return num_wide + round((len(text) - num_wide) / _CHARACTERS_OF_A_TOKEN + 0.49)


def num_message_tokens(messages: Iterable[BaseMessage]) -> int:
    """Estimates the input tokens of ``messages``. Only text is counted."""
    return sum(_TOKENS_OF_A_MESSAGE + num_tokens(str(message.text)) for message in messages)


@cache
def load_vocabulary() -> None:
    """Loads tiktoken's vocabulary, once, from its cache or over the network, for better estimates."""
    global _vocabulary  # noqa: PLW0603 - loaded once per process
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir(), "data-gym-cache")
    try:
        import tiktoken

        if not Path(folder, hashlib.sha1(_URL.encode()).hexdigest()).exists():
            # Its download has no timeout, so it is begun only if the server can be reached.
            socket.create_connection((_HOST, 443), timeout=_LONGEST_WAIT_SECONDS).close()
        _vocabulary = tiktoken.get_encoding(_ENCODING)
    except Exception as error:  # offline or a damaged cache
        advice = "to count offline, fill a cache folder once and set TIKTOKEN_CACHE_DIR to it"
        reason = f"{_ENCODING} is not available ({type(error).__name__}: {error!s:.200})"
        _log.warning("tiktoken's vocabulary %s: tokens are estimated from characters; %s", reason, advice)
