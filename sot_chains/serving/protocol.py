"""OpenAI's chat protocol: requests as they are read, and errors. Pure.

https://platform.openai.com/docs/api-reference/chat. Knows messages; does not know models or connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from langchain_core.messages import BaseMessage, convert_to_messages
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sot_chains.providers.base import ProviderError

_MOST_STOPS = 16
_MOST_REFERENCES = 256
_MOST_TOKENS = 10_000_000
_MOST_SEED = 2**63
_MOST_MESSAGES = 10_000
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias")
# Of the client's bookkeeping: they change nothing about an answer.
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# Given only with these values, which mean what happens anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "logprobs": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "continue_final_message": (True,),
    "add_generation_prompt": (False,),
}
# Arguments of the Python calls behind, which no request may set: the SDK's headers, LangChain's callbacks.
_OF_PYTHON = frozenset(
    {
        *("self", "input", "config", "prefix", "resume", "deadline_seconds", "limit", "on_arrival"),
        *("callbacks", "tags", "run_id", "run_name", "run_manager", "stream_usage", "async_client", "client"),
        *("extra_headers", "extra_query", "extra_body", "timeout", "api_key", "base_url", "http_client"),
    }
)
# What a part of a message holds under the name of its type.
_PARTS: Mapping[str, type] = {
    **{"text": str, "refusal": str, "image_url": str},
    **{"input_audio": Mapping, "file": Mapping},
}


class RefusedError(Exception):
    """A request that is not answered.

    Attributes:
        status: The HTTP status.
        param: The field of the request that is the reason, if it is one.
        code: OpenAI's code for the reason, if there is one.
        retry_after_seconds: When to ask again, if that may help.
        is_counted: Whether the metrics have it already.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        self.is_counted = False

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refused(error: Exception) -> RefusedError:
    """What the client is told about an exception that an answer ended with."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, ProviderError):
        status = error.status or (504 if isinstance(error, TimeoutError) else 502)
        return RefusedError(str(error), status=status, retry_after_seconds=error.retry_after_seconds)
    said_status = getattr(error, "status_code", None)  # of an SDK's error, from a LangChain model
    if isinstance(said_status, int) and 400 <= said_status < 600:
        return RefusedError(str(error), status=said_status)
    # What models raise for arguments that they do not take: wrong values, missing features, large numbers.
    if isinstance(error, ValueError | TypeError | NotImplementedError | OverflowError):
        said = str(error) or type(error).__name__
        return RefusedError(f"the model does not take this request: {said}"[:1000])
    return RefusedError(f"the model failed: {type(error).__name__}: {error}"[:1000], status=500)


class Reference(BaseModel):
    """A text that the answer may copy from, and that its citations name."""

    model_config = ConfigDict(strict=True)

    text: str
    title: str | None = None
    url: str | None = None


class StreamOptions(BaseModel):
    """Of a streamed reply."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``.

    Fields that are not listed here are passed to the model as call parameters, so the model decides on them.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=_MOST_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: list[str] = Field(default_factory=list, max_length=_MOST_STOPS)
    max_tokens: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-_MOST_SEED, lt=_MOST_SEED)
    logit_bias: dict[str, float] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    references: list[Reference] = Field(default_factory=list, max_length=_MOST_REFERENCES)

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str) else value
        return [one for one in value if one != ""] if isinstance(value, list) else _none_as_empty(value)

    @field_validator("tools", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        return _none_as_empty(value)

    @field_validator("references", mode="before")
    @classmethod
    def _references(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return _none_as_empty(value)
        return [{"text": one} if isinstance(one, str) else one for one in value]

    @property
    def bound(self) -> int | None:
        """The bound on the tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_form(self) -> bool:
        """Whether the answer is to be JSON or a call of a tool, which is written in one piece."""
        kind = (self.response_format or {}).get("type", "text")
        return kind != "text" or (bool(self.tools) and self.tool_choice != "none")

    def sampling(self) -> dict[str, Any]:
        """The call parameters that every model call is given."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING}
        given |= {name: value for name, value in (self.model_extra or {}).items() if name not in _IGNORED}
        return {name: value for name, value in given.items() if value is not None and name not in _NEUTRAL}

    def langchain_messages(self) -> list[BaseMessage]:
        """The messages.

        Raises:
            RefusedError: They are none of OpenAI's.
        """
        try:
            return convert_to_messages([_as_langchain(message) for message in self.messages])
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            said = str(error).split("\n")[0][:300]
            raise RefusedError(f"messages are not in OpenAI's format: {said}", param="messages") from error


def unreadable(error: ValidationError) -> RefusedError:
    """What the client is told about a body that is no request."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    said = f"{where}: {first['msg']}" if where else f"the body is not a request: {first['msg']}"
    return RefusedError(said, param=where or None)


def read_request(body: bytes) -> ChatRequest:
    """Reads the body of a request.

    Raises:
        RefusedError: It is not JSON, not a request, or asks for what there is not.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise unreadable(error) from None
    if request.n not in (None, 1):
        raise RefusedError(f"n={request.n}: only one choice is written for a request", param="n")
    extra = request.model_extra or {}
    if taken := sorted(_OF_PYTHON & extra.keys()):
        raise RefusedError(f"{taken[0]} is no field of a request; leave it out", param=taken[0])
    for name, values in _NEUTRAL.items():
        if extra.get(name) is not None and extra[name] not in values:
            raise RefusedError(f"{name} is not supported; leave it out", param=name)
    return request


def _none_as_empty(value: Any) -> Any:
    return [] if value is None else value


def _as_langchain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's as LangChain reads it; unknown roles and shapes are left for it to refuse."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"each message has a role, got {str(message)[:80]}")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"the content of a message is text or a list of parts, got {type(content).__name__}")
    for part in content if isinstance(content, list) else ():
        _check_part(part)
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise ValueError(f"the {role} message has no content")
    return {**message, "role": role, "content": "" if content is None else content}


def _check_part(part: Any) -> None:
    """Checks a part of a message's content; of kinds that are not OpenAI's, the model decides."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise ValueError("each part of a message's content has a type")
    held = part.get(kind)
    if isinstance(held, Mapping) and kind == "image_url":
        held = held.get("url")
    if kind in _PARTS and not isinstance(held, _PARTS[kind]):
        raise ValueError(f"a part of type {kind!r} has no {kind!r} of the right type")


def tool_choice_of(choice: str | dict[str, Any] | None) -> str | None:
    """``tool_choice`` in LangChain's words.

    Raises:
        RefusedError: It is no choice.
    """
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name") if choice.get("type") == "function" else None
        if not isinstance(name, str):
            raise RefusedError("tool_choice names no function", param="tool_choice")
        return name
    return {"required": "any", "none": "none"}.get(choice or "auto")
