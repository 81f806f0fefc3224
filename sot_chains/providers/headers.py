"""What the headers of a response say of limits and of waiting, in each vendor's spelling.

OpenAI counts down (``x-ratelimit-reset-requests: 6m0s``), Anthropic names the moment
(``anthropic-ratelimit-requests-reset: 2026-01-01T00:00:00Z``). Anything unreadable counts as not said.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from sot_chains.providers.base import RateLimits

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def rate_limits_of(headers: Mapping[str, str]) -> RateLimits | None:
    """The limits named in ``headers``, ``None`` if there are none."""
    if "x-ratelimit-limit-requests" in headers or "x-ratelimit-remaining-requests" in headers:
        return RateLimits(
            requests=_whole(headers.get("x-ratelimit-limit-requests")),
            requests_left=_whole(headers.get("x-ratelimit-remaining-requests")),
            requests_reset_seconds=_duration(headers.get("x-ratelimit-reset-requests")),
            tokens=_whole(headers.get("x-ratelimit-limit-tokens")),
            tokens_left=_whole(headers.get("x-ratelimit-remaining-tokens")),
            tokens_reset_seconds=_duration(headers.get("x-ratelimit-reset-tokens")),
        )
    if "anthropic-ratelimit-requests-limit" in headers or "anthropic-ratelimit-tokens-limit" in headers:
        return RateLimits(
            requests=_whole(headers.get("anthropic-ratelimit-requests-limit")),
            requests_left=_whole(headers.get("anthropic-ratelimit-requests-remaining")),
            requests_reset_seconds=_until(headers.get("anthropic-ratelimit-requests-reset")),
            tokens=_whole(headers.get("anthropic-ratelimit-tokens-limit")),
            tokens_left=_whole(headers.get("anthropic-ratelimit-tokens-remaining")),
            tokens_reset_seconds=_until(headers.get("anthropic-ratelimit-tokens-reset")),
        )
    return None


def retry_after_seconds_of(headers: Mapping[str, str]) -> float | None:
    """How long ``headers`` ask to wait: ``retry-after-ms``, or ``retry-after`` as seconds or as a date."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _whole(value: str | None) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _duration(value: str | None) -> float | None:
    """``"6m0s"``, ``"20ms"`` or plain seconds."""
    if value and _PART.sub("", value) == "":
        return sum(float(amount) * _SECONDS[unit] for amount, unit in _PART.findall(value))
    return _number(value)


def _until(value: str | None) -> float | None:
    """How long until the moment ``value`` names."""
    try:
        moment = datetime.fromisoformat(value or "")
    except ValueError:
        return None
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
