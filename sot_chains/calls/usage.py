"""The cost of an answer: tokens by stage, and price.

Token counts are those the server reported. Calls whose usage did not arrive, because they failed or were
cancelled before, or because the server reports none, are estimated and listed separately.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict, cast

from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata, add_usage

_log = logging.getLogger(__name__)
_ENCODING = "o200k_base"  # OpenAI's models since 2024; a fair estimate for others
_HOST = "openaipublic.blob.core.windows.net"
_URL = f"https://{_HOST}/encodings/{_ENCODING}.tiktoken"
_LONGEST_WAIT_SECONDS = 3.0
_vocabulary: Any = None  # tiktoken's encoding
_MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    """The price of a model per million tokens, in any currency.

    Attributes:
        input: Input tokens.
        output: Output tokens.
        cached_input: Input tokens read from the vendor's cache; by default the price of ``input``.
        cache_write: Input tokens written to the cache; by default the price of ``input``.
    """

    input: float
    output: float
    cached_input: float | None = None
    cache_write: float | None = None

    def of(self, tokens: Tokens) -> float:
        """The price of ``tokens``."""
        total = tokens["input_tokens"] * self.input + tokens["output_tokens"] * self.output
        if self.cached_input is not None:
            total += tokens["cached_tokens"] * (self.cached_input - self.input)
        if self.cache_write is not None:
            total += tokens["cache_write_tokens"] * (self.cache_write - self.input)
        return total / _MILLION


class Tokens(TypedDict):
    """Input and output tokens. Cache reads and cache writes are included in the input tokens."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cache_write_tokens: int


class Cost(TypedDict):
    """What was spent on an answer."""

    stages: dict[str, Tokens]  # as the server reported them, by stage: "skeleton", "points", "plain"
    reported: Tokens  # their exact sum
    estimated: Tokens | None  # of calls whose usage did not arrive; None if there were none
    price: float | None  # of all these tokens; None if the model is not in the price table
    saved_by_cache: float | None  # by cache reads, minus the extra price of cache writes


NO_TOKENS = Tokens(input_tokens=0, output_tokens=0, cached_tokens=0, cache_write_tokens=0)


def total_usage(usages: Iterable[UsageMetadata | None]) -> UsageMetadata | None:
    """The sum of ``usages``, ``None`` if none of them is known."""
    known = list(filter(None, usages))
    return reduce(add_usage, known) if known else None


def count_tokens(usage: UsageMetadata | None) -> Tokens:
    """``usage`` as counts."""
    if usage is None:
        return NO_TOKENS
    details = usage.get("input_token_details") or InputTokenDetails()
    return Tokens(
        input_tokens=usage["input_tokens"],
        output_tokens=usage["output_tokens"],
        cached_tokens=details.get("cache_read") or 0,
        cache_write_tokens=details.get("cache_creation") or 0,
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
    """The price of ``model``: under its name, or under the longest name in the table that it starts with.

    Servers answer with dated names, such as ``gpt-4.1-mini-2025-04-14`` for ``gpt-4.1-mini``.
    """
    if prices is None or isinstance(prices, Price):
        return prices
    names = [name for name in prices if model == name or model.startswith(f"{name}-")]
    return prices[max(names, key=len)] if names else None


def compute_cost(stages: Mapping[str, Tokens], estimated: Tokens | None, price: Price | None) -> Cost:
    """Computes the cost of an answer, from the reported tokens by stage and those estimated."""
    reported = total_tokens(stages.values())
    everything = total_tokens((reported, estimated))
    uncached: Tokens = {**everything, "cached_tokens": 0, "cache_write_tokens": 0}
    paid = price.of(everything) if price else None
    return Cost(
        stages=dict(stages),
        reported=reported,
        estimated=estimated,
        price=paid,
        saved_by_cache=price.of(uncached) - paid if price and paid is not None else None,
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
