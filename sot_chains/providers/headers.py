"""How long the headers of a response ask to wait."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FORMS = ("x-ratelimit-{field}-{unit}", "anthropic-ratelimit-{unit}-{field}")  # of OpenAI and Anthropic
_FIELDS = ("remaining", "limit", "reset")
_WANTED = (("requests", 1), ("tokens", 1000))
_MINUTE = 60.0


def parse_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds until the next request may be sent; ``None`` if ``headers`` ask for no pause.

    That is what ``retry-after-ms`` or ``retry-after`` say, or else the time until an exhausted rate limit
    allows a request and its tokens. Vendors count per minute and refill continuously, but report when the
    whole limit is restored, which may take longer.
    """
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None:
        return seconds
    with suppress(TypeError, ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time.time())
    pauses = [
        _refill_seconds(wanted, *(headers.get(form.format(field=field, unit=unit)) for field in _FIELDS))
        for form in _FORMS
        for unit, wanted in _WANTED
    ]
    return max(pauses) or None


def _refill_seconds(wanted: int, left: str | None, limit: str | None, reset: str | None) -> float:
    if _number(left) != 0:
        return 0.0
    num_allowed = int(_number(limit) or 0)
    share = wanted / num_allowed * _MINUTE if num_allowed else _MINUTE
    reset_seconds = _parse_reset(reset or "")
    return share if reset_seconds is None else min(share, reset_seconds)


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _parse_reset(value: str) -> float | None:
    """Seconds from ``"6m0s"``, ``"20ms"``, a plain number of seconds, or until an ISO 8601 time."""
    if value and _PART.sub("", value) == "":
        return sum(float(amount) * _SECONDS[unit] for amount, unit in _PART.findall(value))
    if (seconds := _number(value)) is not None:
        return seconds
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
