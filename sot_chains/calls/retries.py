"""When a failed call is made again, and after how long. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from sot_chains.providers.base import ProviderError
from sot_chains.providers.http import retry_after_seconds_of


@dataclass(frozen=True)
class Retries:
    """How often a call is tried. Every attempt counts against the limits and stands in the trace.

    Attributes:
        max_attempts: Attempts in all, the first included.
        first_pause_seconds: The pause before the second attempt; doubled for each further one.
        longest_pause_seconds: No pause of ours is longer. A server that asks for a longer one gets it.

    Raises:
        ValueError: ``max_attempts`` is below 1, or a pause is negative.
    """

    max_attempts: int = 5
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {self.max_attempts}")
        if min(self.first_pause_seconds, self.longest_pause_seconds) < 0:
            raise ValueError("pauses must not be negative")

    def pause_seconds(self, num_attempts: int, error: BaseException) -> float:
        """How long to wait after ``num_attempts`` attempts, the last of which failed with ``error``.

        Between half of the pause and all of it, so that those who failed together do not return together;
        never less than the server asked for.
        """
        pause = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** min(num_attempts - 1, 30))
        pause *= random.uniform(0.5, 1.0)
        asked = retry_after_seconds_of_error(error)
        return pause if asked is None else max(pause, asked)


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later, by what the error says of itself.

    Our own errors and LangChain's ``ModelError`` have ``is_retryable``. Other errors of chat models count as
    retryable if they carry an HTTP status that means "later" or stem from a lost connection.
    """
    said = getattr(error, "is_retryable", None)
    if isinstance(said, bool):
        return said
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status in (408, 409, 425, 429) or status >= 500
    return isinstance(error, ConnectionError | TimeoutError)


def was_refused(error: BaseException) -> bool:
    """Whether the call was refused before any work was done: the server was busy, not broken."""
    if isinstance(error, ProviderError):
        return error.was_refused
    return getattr(error, "status_code", None) in (429, 503, 529)


def retry_after_seconds_of_error(error: BaseException) -> float | None:
    """How long the server asked to be left alone, if it did."""
    if isinstance(error, ProviderError):
        return error.retry_after_seconds
    headers = getattr(getattr(error, "response", None), "headers", None)
    return retry_after_seconds_of(headers) if isinstance(headers, Mapping) else None
