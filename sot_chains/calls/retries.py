"""When a failed call is retried, and after what backoff. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sot_chains.providers.base import ProviderError
from sot_chains.providers.errors import is_quota_used_up, status_error


@dataclass(frozen=True)
class Retries:
    """Retry policy of a call. Every attempt counts against the rate limits and is in the trace.

    Attributes:
        max_attempts: Attempts in total, including the first.
        first_pause_seconds: Backoff before the second attempt; doubled for each further one.
        longest_pause_seconds: Longest backoff. If the server asks for a longer pause, that one applies.
        longest_wait_seconds: Longest pause that the server may ask for; for a longer one the call fails.
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

    def pause_seconds(self, num_attempts: int, failure: ProviderError) -> float:
        """Seconds to wait after ``num_attempts`` attempts, the last of which ended with ``failure``."""
        asked = failure.retry_after_seconds or 0.0
        if asked > self.longest_wait_seconds:
            raise ProviderError(
                f"{failure}; the server asks to wait {asked:g} s. Ask again then, or wait with "
                f"Retries(longest_wait_seconds=...), now {self.longest_wait_seconds:g}",
                is_retryable=True,
                was_refused=failure.was_refused,
                status=failure.status,
                retry_after_seconds=asked,
            ) from failure
        pause = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** min(num_attempts - 1, 30))
        return max(pause * random.uniform(0.5, 1.0), asked)


def as_provider_error(error: BaseException) -> ProviderError:
    """What ``error`` says of its call: itself, or what an error of an SDK or of LangChain amounts to."""
    if isinstance(error, ProviderError):
        return error
    status, is_retryable = getattr(error, "status_code", None), getattr(error, "is_retryable", None)
    if not isinstance(status, int):
        is_passing = isinstance(error, ConnectionError | TimeoutError)
        return ProviderError(str(error), is_retryable=is_passing if is_retryable is None else is_retryable)
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    said = f"{error} {getattr(error, 'body', None)}"
    failure = status_error(status, said, server="the model", model="", headers=headers)
    if isinstance(is_retryable, bool) and not is_quota_used_up(status, said):
        failure.is_retryable = is_retryable
    return failure
