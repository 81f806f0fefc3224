"""What a failed request means: its status, the server's words, and whether asking again may help.

Pure. Servers report errors with an HTTP status, as an event within a stream that began well, or as a page in
place of a stream; and many in forms of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sot_chains.providers.base import ProviderError
from sot_chains.providers.http import rate_limits_of, retry_after_seconds_of

REFUSED_STATUSES = frozenset({429, 503, 529})  # too busy: no work was done
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
_STATUS_KEYS = ("code", "status", "status_code")
_WORD_KEYS = ("message", "detail", "error", "msg", "code", "type")
_QUOTA = re.compile(
    r"insufficient.{0,10}(quota|balance|credit|funds)|billing.{0,5}(hard.limit|not.active|error)|"
    r"(credit )?balance is too low|exceeded your current quota|out of credits?|spend(ing)?.limit|"
    r"usage limits?.{0,40}(reached|exceeded|regain)",
    re.IGNORECASE,
)
# Of an error without a status: first by its type or code, as "invalid_request_error" or "BadRequestError".
_STATUS_OF_TYPE = (
    (_QUOTA, 402),
    (re.compile(r"rate.?limit|too.?many.?requests|resource.?exhausted", re.IGNORECASE), 429),
    (re.compile(r"overloaded|unavailable", re.IGNORECASE), 529),
    (re.compile(r"authentication|unauthorized|unauthenticated|api.?key", re.IGNORECASE), 401),
    (re.compile(r"permission|forbidden", re.IGNORECASE), 403),
    (re.compile(r"not.?found", re.IGNORECASE), 404),
    (re.compile(r"invalid|bad.?request|validation|context|too.?large|unprocessable", re.IGNORECASE), 400),
    (re.compile(r"timeout", re.IGNORECASE), 504),
    (re.compile(r"api.?error|(server|internal).{0,10}error|\binternal\b", re.IGNORECASE), 500),
)
# Then by its message, which may mention anything, so only by what is unmistakable.
_STATUS_OF_WORDS = (
    (re.compile(r"rate limit|too many requests", re.IGNORECASE), 429),
    (re.compile(r"overloaded|try again later|temporarily unavailable|at capacity", re.IGNORECASE), 503),
    (
        re.compile(
            r"context.(length|window|size)|prompt is too long|input.{0,30}too (long|large)", re.IGNORECASE
        ),
        400,
    ),
)
_REFILLS = re.compile(
    r"per.?(second|minute|hour|day)|retry in|try again in", re.IGNORECASE
)  # a limit by time
_INVISIBLE = re.compile(r"<(script|style)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)


class ReportedError(Exception):
    """An error that a server reports after it has begun to answer with status 200.

    Attributes:
        said: What it says: an error object, or text.
        is_in_place: Whether there is nothing else, so that it stands in place of a reply.
        status: The status it corresponds to, if it tells. A page tells none.
    """

    def __init__(self, said: object, *, is_in_place: bool = False) -> None:
        super().__init__(words_of(said))
        self.said = said
        self.is_in_place = is_in_place
        self.status = None if is_in_place and not isinstance(said, Mapping) else status_of(said)


def error_in(name: str, payload: object) -> object | None:
    """The error that an event or a JSON body reports; ``None`` if it reports none.

    Args:
        name: The name of the event.
        payload: Its JSON value, or text that is not JSON.
    """
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


def status_of(said: object) -> int | None:
    """The HTTP status that a reported error corresponds to; ``None`` if it does not tell."""
    kinds, words = "", said if isinstance(said, str) else ""
    if isinstance(said, Mapping):
        for key in _STATUS_KEYS:
            if re.fullmatch(r"[45]\d\d", value := str(said.get(key))):
                return int(value)
        kinds = " ".join(str(said[key]) for key in ("type", *_STATUS_KEYS) if isinstance(said.get(key), str))
        words = words_of(said)
    for patterns, text in ((_STATUS_OF_TYPE, kinds), (_STATUS_OF_WORDS, words)):
        for pattern, status in patterns:
            if pattern.search(text):
                return status
    return None


def words_of(said: object, otherwise: str = "") -> str:
    """The server's words on one line, with the error's code if they lack it.

    Args:
        said: An error object, possibly inside another one, or text, possibly a page.
        otherwise: What to return if it has no words.
    """
    whole, code, more = said, "", ""
    while isinstance(said, Mapping):
        code = next((said[key] for key in ("code", "type") if _is_telling(key, said.get(key))), code)
        metadata = said.get("metadata")  # where OpenRouter passes on the words of the provider behind it
        if isinstance(metadata, Mapping) and isinstance(raw := metadata.get("raw"), str):
            more = f": {raw}"
        said = next((said[key] for key in _WORD_KEYS if said.get(key)), "")
    text = _INVISIBLE.sub(" ", str(said or otherwise or whole) + more)
    text = " ".join(text.split())[:300]
    return f"{text} ({code})" if code not in text else text


def _is_telling(key: str, value: object) -> bool:
    """Whether the code or the type of an error tells more than its status. Types do of an account alone."""
    return isinstance(value, str) and (key == "code" or bool(_QUOTA.search(value)))


def payload_of(text: str) -> Any:
    """The JSON value of ``text``, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_quota_used_up(status: int | None, said: str) -> bool:
    """Whether the account has nothing left to spend, which waiting does not change."""
    if status == 402:
        return True
    is_refusal = status in (None, 400, 403, 429)
    return is_refusal and bool(_QUOTA.search(said)) and not _REFILLS.search(said)


def status_error(
    status: int, said: str, *, server: str, model: str, headers: Mapping[str, str]
) -> ProviderError:
    """The error for a reply with an error ``status``, be it that of HTTP or one reported within a stream."""
    is_used_up = is_quota_used_up(status, said)
    if is_used_up:
        problem = (
            f"the quota of the account at {server} is used up ({status}): {said}; add credit or raise the "
            "account's spending limit there"
        )
    elif status in (401, 403):
        problem = f"{server} refuses the API key ({status}): {said}"
    elif status in (400, 404, 413, 422):
        problem = (
            f"{server} refuses the request for model {model!r} ({status}): {said}; "
            "check the model's name and the request's length and parameters"
        )
    elif status == 429:
        problem = f"the rate limit of {server} is exceeded (429): {said}; set limits=Limits(...)"
    else:
        problem = f"{server} answered with status {status}: {said}"
    return ProviderError(
        problem,
        is_retryable=(status in RETRYABLE_STATUSES or status >= 500) and not is_used_up,
        was_refused=status in REFUSED_STATUSES and not is_used_up,
        status=status,
        retry_after_seconds=retry_after_seconds_of(headers),
        rate_limits=rate_limits_of(headers),
    )


def without_answer(model: str, finish_reason: str | None, num_tokens: int | None) -> ProviderError:
    """The error for a reply that has no text because its tokens went into reasoning."""
    tokens = f"all of about {num_tokens} tokens" if num_tokens else "all tokens"
    return ProviderError(
        f"{model} wrote no answer: {tokens} went into reasoning (it ended with {finish_reason!r}); raise "
        "max_tokens, or switch reasoning off"
    )
