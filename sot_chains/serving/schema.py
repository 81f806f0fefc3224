"""OpenAI's chat protocol: requests as they are read, and errors. Pure.

https://platform.openai.com/docs/api-reference/chat. Knows messages; does not know models or connections.
"""

from __future__ import annotations

import json
import re
import tomllib
from codecs import BOM_UTF8
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar

from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import BaseMessage, convert_to_messages
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sot_chains.providers.base import ProviderError
from sot_chains.providers.errors import OVERFLOW

T = TypeVar("T", bound=BaseModel)

_MAX_TOKENS = 10_000_000
_MAX_SEED = 2**63
# An escape in JSON that is half of a surrogate pair and so no character; group 1 is any other one.
_HALF = re.compile(rb"(?i)(\\ud[89ab]..\\ud[c-f]..|\\[^u])|\\ud[89a-f]..")
_ZERO = ("presence_penalty", "frequency_penalty", "logit_bias")  # change nothing if they are 0 or empty
_SAMPLING = ("temperature", "top_p", "seed", "drafter", *_ZERO)
_FIELDS = tomllib.loads(files("sot_chains.serving").joinpath("fields.toml").read_text("utf-8"))
_NEUTRAL, _RESERVED = _FIELDS["neutral"], _FIELDS["reserved"]
# What a part of a message holds under the name of its kind; the model decides on other kinds.
_PARTS: Mapping[str, Any] = {
    **{"text": str, "refusal": str, "image_url": str | Mapping},
    **{"input_audio": Mapping, "file": Mapping},
}


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null(one) for name, one in value.items() if one is not None}
    return list(map(_without_null, value)) if isinstance(value, list) else value


Objects = Annotated[list[dict[str, Any]], BeforeValidator(_without_null)]


@dataclass(eq=False)
class RefusedError(Exception):
    """A request that is not answered: its HTTP status, the field that is the reason, and OpenAI's code."""

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    retry_after_seconds: float | None = None
    is_counted: bool = False  # by the metrics

    def __str__(self) -> str:
        return self.message

    @classmethod
    def from_error(cls, error: Exception) -> RefusedError:
        """What the client is told about an exception that an answer ended with."""
        if isinstance(error, RefusedError):
            return error
        pause = error.retry_after_seconds if isinstance(error, ProviderError) else None
        status = getattr(error, "status", None) or getattr(error, "status_code", None)  # the latter of SDKs
        is_refusal = status in (400, 413, 422) or isinstance(error, ValueError)
        if isinstance(error, ContextOverflowError) or (is_refusal and OVERFLOW.search(str(error))):
            code = "context_length_exceeded"  # which clients look for in the message, too
            return cls(f"{error} ({code}: it exceeds the context window)", code=code)
        if isinstance(status, int) and 400 <= status < 600:
            return cls(str(error), status, retry_after_seconds=pause)
        if isinstance(error, ProviderError):
            return cls(str(error), 504 if isinstance(error, TimeoutError) else 502, retry_after_seconds=pause)
        # Models raise these for wrong values, missing features and numbers out of range.
        if isinstance(error, ValueError | TypeError | NotImplementedError | OverflowError):
            return cls(f"the model refuses this request: {error or type(error).__name__}"[:1000])
        return cls(f"the model failed: {type(error).__name__}: {error}"[:1000], 500)

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Body(BaseModel):
    """What a client sends. A field that is ``null`` is one that is not sent."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in _RESERVED}


class Reference(Body):
    """A text that the answer may copy from, and that its citations name."""

    text: str
    title: str | None = None
    url: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_any_form(cls, given: Any) -> Any:
        """Reads a text alone, and Cohere's form: what a document holds is its ``data`` or ``snippet``."""
        if isinstance(given, dict) and "data" in given:
            held = given["data"] if isinstance(given["data"], dict) else {"text": given["data"]}
            given = {"title": given.get("id"), **held}
        if isinstance(given, dict) and "snippet" in given:
            given = {"text": given["snippet"], **given}
        return {"text": given} if isinstance(given, str) else given

    @property
    def document(self) -> Document:
        """The same as LangChain has it."""
        return Document(self.text, metadata=self.model_dump(include={"title", "url"}, exclude_none=True))


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: bool = False


class ChatRequest(Body):
    """The body of ``POST /v1/chat/completions``."""

    model: str
    messages: Objects = Field(min_length=1, max_length=10_000)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=1)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-_MAX_SEED, lt=_MAX_SEED)
    logit_bias: dict[str, float] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    drafter: str | None = Field(default=None, alias="speculative")  # by name, of a local model
    references: list[Reference] = Field([], max_length=256)
    documents: list[Reference] = Field([], max_length=256)  # which the model is shown besides

    @property
    def stops(self) -> list[str]:
        """The strings before which the answer ends."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if stop]

    @property
    def token_limit(self) -> int | None:
        """The most tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def form(self) -> dict[str, Any] | None:
        """The form of the answer, unless it is text."""
        form = self.response_format or {}
        return form if form.get("type", "text") != "text" else None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def is_in_one_piece(self) -> bool:
        """Whether the answer is to be JSON or a tool call, which is not written by points."""
        return bool(self.form or self.callable_tools)

    def sampling(self) -> dict[str, Any]:
        """The call parameters that every model call is given, without those that change nothing."""
        given = {name: getattr(self, name) for name in _SAMPLING} | (self.model_extra or {})
        unsent = {*_NEUTRAL, *_FIELDS["ignored"], *(name for name in _ZERO if not given[name])}
        return {name: one for name, one in given.items() if one not in (None, {}, []) and name not in unsent}

    def langchain_messages(self) -> list[BaseMessage]:
        """The messages as LangChain's; refused if they are not in OpenAI's format."""
        try:
            return convert_to_messages([_for_langchain(message) for message in self.messages])
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            reason = str(error).split("\n")[0][:300]
            raise RefusedError(f"messages are not in OpenAI's format: {reason}", param="messages") from error

    def langchain_tool_choice(self) -> str | None:
        """``tool_choice`` in LangChain's words."""
        choice = self.tool_choice
        if isinstance(choice, dict):
            name = (choice.get("function") or {}).get("name") if choice.get("type") == "function" else None
            if not isinstance(name, str):
                raise RefusedError("tool_choice names no function", param="tool_choice")
            return name
        return {"required": "any", "none": "none"}.get(choice or "auto")


def with_whole_characters(text: bytes) -> bytes:
    """JSON in which halves of surrogate pairs, such as come from a cut emoji, are replaced."""
    return _HALF.sub(lambda escape: escape[1] or rb"\ufffd", text) if b"\\ud" in text.lower() else text


def read_body_as(kind: type[T], body: bytes) -> T:
    """Reads a body in JSON as a ``kind``; refused if it is none."""
    text = with_whole_characters(body.removeprefix(BOM_UTF8))
    try:
        read = kind.model_validate_json(text)
        json.dumps(json.loads(text), allow_nan=False)  # no server takes what is no number in JSON
        return read
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        message = f"{field or 'the body is not a valid request'}: {first['msg']}"
        raise RefusedError(message, param=field or None) from None
    except ValueError as error:
        raise RefusedError(f"the body is not valid JSON: {error}") from None


def read_request(body: bytes) -> ChatRequest:
    """Reads the body of a request; refused if it is no request or requests an unsupported feature."""
    request = read_body_as(ChatRequest, body)
    for name, value in (request.model_extra or {}).items():
        if name in _RESERVED or value not in _NEUTRAL.get(name, (value,)):
            raise RefusedError(f"{name} requests an unsupported feature; omit it", param=name)
    for function in [tool.get("function") for tool in request.tools or () if tool.get("type") == "function"]:
        if not (isinstance(function, dict) and function.get("name")):
            raise RefusedError("tools: each function has a name", param="tools")
    return request


def _for_langchain(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"each message has a role, got {str(message)[:80]}")
    if content is None and role == "assistant":
        content = message.get("refusal")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"the content of a message is text or a list of parts, got {type(content).__name__}")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise ValueError("each part of a message's content has a type")
        if kind in _PARTS and not isinstance(part.get(kind), _PARTS[kind]):
            raise ValueError(f"a part of type {kind!r} has no {kind!r} of the right type")
        if isinstance(part.get("image_url"), str):
            part["image_url"] = {"url": part["image_url"]}
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise ValueError(f"the {role} message has no content")
    converted = {**message, "content": content or ""}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) and "function" in call for call in calls):
        converted["tool_calls"] = list(map(_make_call, calls))
    return converted


def _make_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ValueError("each tool call has a function with a name")
    given = function.get("arguments") or {}
    with suppress(ValueError):
        given = json.loads(with_whole_characters(given.encode())) if isinstance(given, str) else given
    arguments = given if isinstance(given, dict) else {"arguments": given} if given else {}
    return {"name": function["name"], "args": arguments, "id": call.get("id"), "type": "tool_call"}
