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
# Of the client's bookkeeping: they change nothing about an answer.
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# Given only with these values, which mean what happens anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "logprobs": (False,),
    "function_call": ("none",),
    "functions": ([],),
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
    if isinstance(error, ValueError | TypeError | NotImplementedError):
        said = str(error) or type(error).__name__
        return RefusedError(f"the model does not take this request: {said}"[:1000])
    return RefusedError(f"the model failed: {type(error).__name__}: {error}"[:1000], status=500)


class Reference(BaseModel):
    """A text that the answer may copy from, and that its citations name."""

    text: str
    title: str | None = None
    url: str | None = None


class StreamOptions(BaseModel):
    """Of a streamed reply."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``.

    Fields that are not listed here are passed to the model as call parameters, so the model decides on them.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    stop: list[str] = Field(default_factory=list, max_length=_MOST_STOPS)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    references: list[Reference] = Field(default_factory=list, max_length=_MOST_REFERENCES)

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str) else value or []
        return [one for one in value if one != ""] if isinstance(value, list) else value

    @field_validator("tools", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        return value or []

    @field_validator("references", mode="before")
    @classmethod
    def _references(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value or []
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
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
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


def read_request(body: bytes) -> ChatRequest:
    """Reads the body of a request.

    Raises:
        RefusedError: It is not JSON, not a request, or asks for what there is not.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = f"{where}: {first['msg']}" if where else f"the body is not a request: {first['msg']}"
        raise RefusedError(said, param=where or None) from None
    if (request.n or 1) != 1:
        raise RefusedError(f"n={request.n}: only one choice is written for a request", param="n")
    extra = request.model_extra or {}
    for name, values in _NEUTRAL.items():
        if extra.get(name) is not None and extra[name] not in values:
            raise RefusedError(f"{name} is not supported; leave it out", param=name)
    return request


def _as_langchain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's as LangChain reads it; unknown roles and shapes are left for it to refuse."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"each message has a role, got {str(message)[:80]}")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"the content of a message is text or a list of parts, got {type(content).__name__}")
    if isinstance(content, list) and not all(
        isinstance(part, dict) and isinstance(part.get("type"), str) for part in content
    ):
        raise ValueError("each part of a message's content has a type")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise ValueError(f"the {role} message has no content")
    return {**message, "role": role, "content": "" if content is None else content}


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
