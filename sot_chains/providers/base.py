"""The provider protocol: what Skeleton-of-Thought needs from a model, and in which form it is sent.

A provider streams one completion, and says whether the model continues a prefilled reply. Providers know
nothing of skeletons and points.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal, Protocol, runtime_checkable

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Delta:
    """A piece of a completion. Plain and slotted, since there is one per token."""

    text: str = ""  # since the last delta
    usage: UsageMetadata | None = None  # tokens to add to the completion's count, so no running totals
    finish_reason: str | None = None  # as the model reports it; on the last delta
    response_metadata: dict[str, Any] | None = None  # such as ``model_name``
    pause_seconds: float | None = None  # that the server asks to wait before the next request
    remaining: Mapping[str, int] | None = None  # of the account's limits, as the server's headers say
    reasoning: str = ""  # since the last delta, if the server reports it apart from the text


Ending = Literal["whole", "calls", "length", "filtered", "failed"]
WORDS = tomllib.loads(files("sot_chains.providers").joinpath("words.toml").read_text("utf-8"))
_NO_LETTER = re.compile(r".*\.|(finish_)?reason_|[^a-z]")  # FinishReason.STOP, FINISH_REASON_STOP, end-turn


@lru_cache
def find_ending(finish_reason: str | None) -> Ending:
    """How a completion ended, by the reason that the model reports; any that is not known is a failure."""
    reason = "stop" if finish_reason is None else _NO_LETTER.sub("", finish_reason.lower())
    endings = WORDS["endings"].items()
    return next((ending for ending, known in endings if re.fullmatch(known, reason)), "failed")


@cache
def warn_once(message: str) -> None:
    """Logs that a request goes out without something that was asked for, once in a process."""
    _log.warning(message)


@runtime_checkable
class Provider(Protocol):
    """A model that streams completions."""

    @property
    def supports_prefill(self) -> bool:
        """Whether a final assistant message is continued rather than answered."""

    @property
    def model_name(self) -> str:
        """The model's name, for answers whose completions do not carry one."""

    def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        """Sends ``messages`` and yields the completion as it arrives.

        Closing the iterator ends the request. If ``messages`` ends with a prefilled reply, only its
        continuation is yielded.

        Raises:
            ProviderError: The request failed, or the reply was interrupted.
        """


@dataclass(eq=False, repr=False)
class ProviderError(RuntimeError):
    """A model call failed; the message names the server, the problem and what to check."""

    message: str
    _: KW_ONLY
    is_retryable: bool = False  # whether the same request may succeed later
    was_refused: bool = False  # whether a busy server rejected it before doing any work
    is_unbilled: bool = False  # whether it certainly used no tokens
    status: int | None = None  # of HTTP
    retry_after_seconds: float | None = None  # the wait that the server asked for
    # Text and usage of the failed answer so far, which the chain sets; pass it as ``resume=`` to go on.
    trace: Mapping[str, Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.is_unbilled |= self.status is not None  # an error instead of a reply


class PrefillRefusedError(ProviderError):
    """The model does not continue a prefilled reply; remembered for all later requests."""


class PromptOverflowError(ProviderError, ContextOverflowError):
    """The prompt is longer than the model's context; callers that shorten it know LangChain's error."""


class DeadlineError(ProviderError, TimeoutError):
    """The deadline passed before there was any text to return."""


@runtime_checkable
class ContinuesReplies(Protocol):
    """A model that says whether it continues a final assistant message; any chat model may have this."""

    @property
    def supports_assistant_prefill(self) -> bool:
        """Whether a final assistant message is continued rather than answered."""


@runtime_checkable
class LocalChatModel(ContinuesReplies, Protocol):
    """A local chat model, whose calls share one batch and take further parameters.

    The attributes named like parameters hold the values of a call that does not set them.
    """

    max_tokens: int | None
    min_tokens: int  # before which the model does not end a reply
    presence_penalty: float  # how much less likely tokens become that the reply already has
    stop: list[str] | None  # before which a reply ends

    @property
    def opens_reasoning(self) -> bool:
        """Whether the chat template begins each reply inside a block of reasoning."""

    @property
    def takes_grammars(self) -> bool:
        """Whether calls take ``grammar``: a Lark grammar of ``llguidance`` that bounds the reply."""

    def splitting_gain(self, num_answers: int, num_rows: int, num_parts: int, part_tokens: int) -> float:
        """How many times as fast answers, now ``num_rows`` rows, and all else are if all are in parts."""


@runtime_checkable
class WrapsModel(Protocol):
    """A chain that passes the arguments of its calls on to its model, such as ``RetrievalCopyChain``."""

    @property
    def model(self) -> object:
        """The model, if it is a Runnable; chat models call their names so."""


_ID = re.compile(r"[\w-]{1,40}", re.ASCII)  # that both OpenAI and Anthropic take
_CALLS = ("tool_use", "tool_call", "function_call", "invalid_tool_call")  # as parts of a message
_NO_RESULT = "There is no result: the call was not carried out."


def with_results(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """``messages`` with one result right behind each tool call, as APIs insist."""
    paired: list[BaseMessage | None] = []
    waiting: dict[object, list[tuple[int, str]]] = {}  # where results go, and the identifier they get
    taken: set[str] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            if places := waiting.get(message.tool_call_id):
                place, call_id = places.pop(0)
                paired[place] = message.model_copy(update={"tool_call_id": call_id})
            else:
                warn_once("a tool result in the history belongs to no call before it: it is left out")
            continue
        paired.append(message)
        listed = message.content if isinstance(message.content, list) else ()
        parts = [part for part in listed if isinstance(part, dict)] if listed else []
        for part in parts:  # a result within a user's message, as Anthropic has it
            for place, _ in waiting.pop(part.get("tool_use_id"), ()):
                paired[place] = None
        if not isinstance(message, AIMessage) or not (calls := _find_calls(message, parts)):
            continue
        others = [one for one in message.content if one not in parts or one["type"] not in _CALLS]
        content = message.content if isinstance(message.content, str) else others
        update = {"content": content, "tool_calls": calls, "invalid_tool_calls": []}
        paired[-1] = message.model_copy(update=update)
        waiting |= {call["id"] or "": [] for call in calls}
        for call in calls:
            given = call["id"] or ""
            if given in taken or not _ID.fullmatch(given):
                call["id"] = f"call{len(paired):05}"
            taken.add(call["id"])
            waiting[given].append((len(paired), call["id"]))
            paired.append(ToolMessage(_NO_RESULT, tool_call_id=call["id"], status="error"))
    if taken and any(message and message.content == _NO_RESULT for message in paired):
        warn_once("a tool call in the history has no result: one that says so is sent")
    return list(filter(None, paired))


def _find_calls(message: AIMessage, parts: Sequence[dict[Any, Any]]) -> list[Any]:
    calls: list[Any] = [{**call} for call in message.tool_calls]
    for call in message.invalid_tool_calls:
        args = {"arguments": call["args"]} if call["args"] else {}
        calls.append({"type": "tool_call", "id": call["id"], "name": call["name"], "args": args})
    for part in parts if not calls else ():
        if part.get("type") == "tool_use":
            name, args = part.get("name"), part.get("input") or {}
            calls.append({"type": "tool_call", "id": part.get("id"), "name": name, "args": args})
    return calls
