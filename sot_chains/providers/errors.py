"""What a failed request means: its status, the server's words, and whether and when it is retried.

Pure. Servers report errors with a status, within a stream that began well, or as a page in place of a stream.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import product
from typing import Any

import httpx2

from sot_chains.providers.base import WORDS, PromptOverflowError, ProviderError

REFUSED_STATUSES = frozenset({429, 503, 529})  # too busy: no work was done
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
_STATUS_KEYS = ("code", "status", "status_code")
_WORD_KEYS = ("message", "detail", "error", "msg", "code", "type")
_QUOTA, OVERFLOW, _REFILLS = (
    re.compile(WORDS["errors"][name], re.IGNORECASE) for name in ("quota", "overflow", "refills")
)
_STATUSES = [(re.compile(words, re.IGNORECASE), status) for words, status in WORDS["errors"]["statuses"]]
_NUM_FOR_MESSAGES = 3
_INVISIBLE = re.compile(r"<(script|style)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)

_FORMS = ("x-ratelimit-{field}-{unit}", "anthropic-ratelimit-{unit}-{field}")  # of OpenAI and Anthropic
_WANTED = {"requests": 1, "tokens": 1000, "input-tokens": 1000, "output-tokens": 1000}


class ReportedError(Exception):
    """An error object or text that a server reports after it has begun to answer with status 200."""

    def __init__(self, said: object, *, is_in_place: bool = False) -> None:
        super().__init__(describe(said))
        self.is_in_place = is_in_place  # of a reply
        # The status it corresponds to, if it tells. A page tells none.
        self.status = None if is_in_place and not isinstance(said, Mapping) else _find_status(said)


def find_error(name: str, payload: object) -> object | None:
    """The error that the event ``name`` or a JSON body reports; ``None`` if it reports none."""
    if isinstance(payload, list) and payload:
        payload = payload[0]
    if not isinstance(payload, Mapping):
        return payload if name == "error" else None
    choices = payload.get("choices")
    for part in (payload, *(choices if isinstance(choices, list) else ())):
        if isinstance(part, Mapping) and (error := part.get("error")):
            return error if isinstance(error, Mapping) else part
    is_error = name == "error" or "error" in (payload.get("object"), payload.get("type"))
    return payload if is_error or ("detail" in payload and not choices) else None


def _find_status(said: object) -> int | None:
    kinds = ""
    if isinstance(said, Mapping):
        for key in _STATUS_KEYS:
            if re.fullmatch(r"[45]\d\d", value := str(said.get(key))):
                return int(value)
        kinds = " ".join(str(said[key]) for key in ("type", *_STATUS_KEYS) if isinstance(said.get(key), str))
    if _QUOTA.search(kinds):
        return 402
    statuses = [status for pattern, status in _STATUSES if pattern.search(kinds)]
    words = describe(said)
    statuses += [status for pattern, status in _STATUSES[:_NUM_FOR_MESSAGES] if pattern.search(words)]
    return statuses[0] if statuses else None


def describe(said: object, otherwise: str = "") -> str:
    """A server's words on one line, or ``otherwise``, with the error's code if they lack it."""
    whole, code, more = said, "", ""
    while isinstance(said, Mapping):
        for key in ("type", "code"):  # a type tells more than the status if it is about the account
            value = said.get(key)
            if isinstance(value, str) and (key == "code" or _QUOTA.search(value)):
                code = value
        metadata = said.get("metadata")  # where OpenRouter passes on the words of the provider behind it
        if isinstance(metadata, Mapping) and isinstance(raw := metadata.get("raw"), str):
            more = f": {raw}"
        said = next((said[key] for key in _WORD_KEYS if said.get(key)), "")
    text = _INVISIBLE.sub(" ", str(said or otherwise or whole) + more)
    text = " ".join(text.split())[:300]
    return f"{text} ({code})" if code not in text else text


def is_quota_used_up(status: int, said: str) -> bool:
    """Whether the account has nothing left to spend, which waiting does not change."""
    may_be = status in (400, 403, 429) and _QUOTA.search(said) and not _REFILLS.search(said)
    return status == 402 or bool(may_be)


def status_error(
    status: int, said: str, *, server: str, model: str, headers: Mapping[str, str]
) -> ProviderError:
    """The error for a reply with an error ``status``, be it that of HTTP or one reported within a stream."""
    if is_used_up := is_quota_used_up(status, said):
        problem = (
            f"the quota of the account at {server} is used up ({status}): {said}; add credit or raise the "
            "account's spending limit there"
        )
    elif status in (401, 403):
        problem = f"{server} refuses the API key ({status}): {said}"
    elif status in (400, 404, 413, 422):
        problem = (
            f"{server} refuses the request for model {model!r} ({status}): {said}; "
            "check base_url, the model's name and the request's length and parameters"
        )
    elif status == 429:
        problem = f"the rate limit of {server} is exceeded (429): {said}; set limits=Limits(...)"
    else:
        problem = f"{server} answered with status {status}: {said}"
    kind = PromptOverflowError if status in (400, 413, 422) and OVERFLOW.search(said) else ProviderError
    return kind(
        problem,
        is_retryable=(status in RETRYABLE_STATUSES or status >= 500) and not is_used_up,
        was_refused=status in REFUSED_STATUSES and not is_used_up,
        status=status,
        retry_after_seconds=parse_pause(headers),
    )


def explain(
    error: BaseException, sdk: Any, *, server: str, model: str, headers: Mapping[str, str]
) -> ProviderError:
    """The error to raise for one of the vendor's SDK or of httpx2, or a :class:`ReportedError`."""
    if isinstance(error, sdk.APITimeoutError | httpx2.TimeoutException):
        slow = f"{server} did not answer in time; raise timeout=... or check its load"
        return ProviderError(slow, is_retryable=True)
    if isinstance(error, sdk.APIConnectionError):
        return ProviderError(
            f"no connection to {server} ({error.__cause__ or error}); check that the server is running and "
            "that base_url is its address",
            is_retryable=True,
            is_unbilled=isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout),
        )
    if isinstance(error, sdk.APIStatusError):
        said, headers = describe(error.body, error.message), error.response.headers
        return status_error(error.status_code, said, server=server, model=model, headers=headers)
    if not isinstance(error, ReportedError):
        return broke_off(server, f"{type(error).__name__}: {error}"[:300])
    if error.status is not None:
        return status_error(error.status, str(error), server=server, model=model, headers=headers)
    if error.is_in_place:
        return ProviderError(
            f"{server} answered with something else in place of a stream: {error}; check that base_url is "
            "the address of its API",
            is_unbilled=True,
        )
    return broke_off(server, str(error))


def broke_off(server: str, said: str) -> ProviderError:
    """The error for a reply that is not whole."""
    return ProviderError(f"{server} broke off its answer: {said}", is_retryable=True)


def wait_too_long(said: str, seconds: float, longest_seconds: float, **known: Any) -> ProviderError:
    """The error for a pause that the server asks for and that would be longer than the caller waits."""
    advice = f"Ask again then, or wait with Retries(longest_wait_seconds=...), now {longest_seconds:g}"
    return ProviderError(f"{said}. {advice}", is_retryable=True, retry_after_seconds=seconds, **known)


def without_answer(model: str, finish_reason: str | None, num_tokens: int | None) -> ProviderError:
    """The error for a reply that has no text because its tokens went into reasoning."""
    tokens = f"all of about {num_tokens} tokens" if num_tokens else "all tokens"
    return ProviderError(
        f"{model} wrote no answer: {tokens} went into reasoning (it ended with {finish_reason!r}); raise "
        "max_tokens, or switch reasoning off"
    )


def parse_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds until the next request may be sent; ``None`` if ``headers`` ask for no pause.

    That is what ``retry-after-ms`` or ``retry-after`` say, or else the time in which an exhausted rate limit
    refills by a request and its tokens. Vendors count per minute and refill continuously.
    """
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None:
        return seconds
    with suppress(TypeError, ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time.time())
    pauses = [0.0]
    for form, unit in product(_FORMS, _WANTED):
        limit = _number(headers.get(form.format(field="limit", unit=unit)))
        if limit and _number(headers.get(form.format(field="remaining", unit=unit))) == 0:
            pauses.append(_WANTED[unit] / limit * 60)
    return max(pauses) or None


def parse_remaining(headers: Mapping[str, str]) -> Mapping[str, int] | None:
    """What the account may still send, as ``headers`` say, by limit: ``requests``, ``input_tokens``."""
    remaining = {}
    for form, unit in product(_FORMS, _WANTED):
        if (left := _number(headers.get(form.format(field="remaining", unit=unit)))) is not None:
            remaining[unit.replace("-", "_")] = int(left)
    return remaining or None


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


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
            known = {"was_refused": failure.was_refused, "status": failure.status}
            said = f"{failure}; the server asks to wait {asked:g} s"
            raise wait_too_long(said, asked, self.longest_wait_seconds, **known) from failure
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
