"""When a failed call is retried, and after what backoff. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from sot_chains.providers.base import ProviderError
from sot_chains.providers.errors import REFUSED_STATUSES, RETRYABLE_STATUSES, is_quota_used_up
from sot_chains.providers.headers import parse_retry_after


@dataclass(frozen=True)
class Retries:
    """Retry policy of a call. Every attempt counts against the rate limits and is in the trace.

    Attributes:
        max_attempts: Attempts in total, including the first.
        first_pause_seconds: Backoff before the second attempt; doubled for each further one.
        longest_pause_seconds: Longest backoff. If the server asks for a longer pause, that one applies.
        longest_wait_seconds: Longest pause that the server may ask for. A call that would have to wait longer
            fails, and its error says how long.

    Raises:
        ValueError: ``max_attempts`` is below 1, or a pause is negative.
    """

    max_attempts: int = 5
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 20.0
    longest_wait_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {self.max_attempts}")
        if min(self.first_pause_seconds, self.longest_pause_seconds, self.longest_wait_seconds) < 0:
            raise ValueError("pauses must not be negative")

    def pause_seconds(self, num_attempts: int, error: BaseException) -> float:
        """Seconds to wait after ``num_attempts`` attempts, the last of which failed with ``error``.

        The backoff is scaled by a random factor from 0.5 to 1, so that calls that failed together are not
        retried together; it is never shorter than the server asked for.
        """
        pause = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** min(num_attempts - 1, 30))
        pause *= random.uniform(0.5, 1.0)
        asked = retry_after_seconds_of_error(error)
        return pause if asked is None else max(pause, asked)

    def check_wait(self, error: BaseException) -> None:
        """Checks that the server, if it asks for a pause, asks for one that is waited out.

        Raises:
            ProviderError: It asks for a longer one.
        """
        asked = retry_after_seconds_of_error(error)
        if asked is not None and asked > self.longest_wait_seconds:
            status = error.status if isinstance(error, ProviderError) else getattr(error, "status_code", None)
            raise ProviderError(
                f"{error}; the server asks to wait {asked:g} s. Ask again then, or wait with "
                f"Retries(longest_wait_seconds=...), now {self.longest_wait_seconds:g}",
                is_retryable=True,
                was_refused=was_refused(error),
                status=status,
                retry_after_seconds=asked,
            ) from error


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later.

    Our own errors and LangChain's ``ModelError`` have ``is_retryable``. Other errors are retryable if they
    carry a transient HTTP status, or if they are connection errors or timeouts.
    """
    if _is_of_quota(error):
        return False
    said = getattr(error, "is_retryable", None)
    if isinstance(said, bool):
        return said
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status in RETRYABLE_STATUSES or status >= 500
    return isinstance(error, ConnectionError | TimeoutError)


def _is_of_quota(error: BaseException) -> bool:
    """Whether an SDK's error, as LangChain's models raise it, says that the account has nothing left."""
    status = getattr(error, "status_code", None)
    return isinstance(status, int) and is_quota_used_up(status, f"{error} {getattr(error, 'body', None)}")


def was_refused(error: BaseException) -> bool:
    """Whether a busy server rejected the call before doing any work."""
    if isinstance(error, ProviderError):
        return error.was_refused
    return getattr(error, "status_code", None) in REFUSED_STATUSES and not _is_of_quota(error)


def retry_after_seconds_of_error(error: BaseException) -> float | None:
    """The seconds that the server asked to wait, if it did."""
    if isinstance(error, ProviderError):
        return error.retry_after_seconds
    headers = getattr(getattr(error, "response", None), "headers", None)
    return parse_retry_after(headers) if isinstance(headers, Mapping) else None
