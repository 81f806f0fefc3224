"""Rate limits and waits from the headers of a response."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from sot_chains.providers.base import RateLimits

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_rate_limits(headers: Mapping[str, str]) -> RateLimits | None:
    """The rate limits in ``headers``, OpenAI's or Anthropic's; ``None`` if there are none."""
    for name, parse_reset in (
        ("x-ratelimit-{field}-{unit}", _duration),
        ("anthropic-ratelimit-{unit}-{field}", _seconds_until),
    ):
        values: list[float | None] = []
        for unit in ("requests", "tokens"):
            values += (_whole(headers.get(name.format(field=f, unit=unit))) for f in ("limit", "remaining"))
            values.append(parse_reset(headers.get(name.format(field="reset", unit=unit))))
        if any(value is not None for value in values):
            return RateLimits(*values)  # type: ignore[arg-type]  # counts are whole numbers
    return None


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """The wait that ``headers`` ask for: ``retry-after-ms``, or ``retry-after`` as seconds or as a date."""
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
    """Seconds from ``"6m0s"``, ``"20ms"`` or a plain number of seconds."""
    if value and _PART.sub("", value) == "":
        return sum(float(amount) * _SECONDS[unit] for amount, unit in _PART.findall(value))
    return _number(value)


def _seconds_until(value: str | None) -> float | None:
    """Seconds until the ISO 8601 time ``value``."""
    try:
        moment = datetime.fromisoformat(value or "")
    except ValueError:
        return None
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
