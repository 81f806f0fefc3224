"""What an answer records of its making, found in ``response_metadata["sot"]``.

Plain dicts of JSON values, so that it survives every serialiser. Times are in seconds since the answer was
begun. No key is called ``index``: LangChain merges dicts of streamed messages that share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, TypedDict

from langchain_core.messages.ai import UsageMetadata, add_usage

from sot_chains.providers.base import Delta


class CallTrace(TypedDict):
    """One model call.

    ``start_seconds`` is when it was sent, after any wait for ``max_concurrency``;
    ``first_text_seconds`` is ``None`` for a call that wrote nothing, ``usage`` for a model that does not
    count.
    """

    start_seconds: float
    first_text_seconds: float | None
    end_seconds: float
    usage: UsageMetadata | None
    finish_reason: str | None


class PointTrace(CallTrace):
    """One point and the call that wrote it."""

    number: int
    label: str
    text: str


class SotTrace(TypedDict):
    """How one answer came about.

    Attributes:
        route: ``"sot"``, or ``"plain"`` where the model answered in one piece.
        route_reason: Why that route.
        skeleton: The headings of the points; on the plain route, of what little was found.
        skeleton_reply: What the model replied to the skeleton request, ``None`` if it was not asked.
        skeleton_call: The call of the first stage, ``None`` if it was not made.
        points: The calls of the second stage, in reading order.
        plain_call: The call of the plain route, else ``None``.
        seconds: From beginning to end.
        first_text_seconds: When the first text of the answer could be read, headings included.
        critical_path_seconds: What no amount of parallelism saves: the skeleton and then the longest point.
        num_calls: Model calls made.
        usage: Tokens of all calls, ``None`` if no call reported any.
    """

    route: Literal["sot", "plain"]
    route_reason: str
    skeleton: list[str]
    skeleton_reply: str | None
    skeleton_call: CallTrace | None
    points: list[PointTrace]
    plain_call: CallTrace | None
    seconds: float
    first_text_seconds: float | None
    critical_path_seconds: float
    num_calls: int
    usage: UsageMetadata | None


@dataclass(slots=True)
class Call:
    """A model call while it is made.

    Attributes:
        name: What its run is called.
        shown: The cleaned pieces of its text.
    """

    name: str
    start_seconds: float = 0.0
    first_text_seconds: float | None = None
    end_seconds: float = 0.0
    usage: UsageMetadata | None = None
    finish_reason: str | None = None
    model_name: str | None = None
    shown: list[str] = field(default_factory=list)

    def take(self, delta: Delta, now_seconds: float) -> None:
        """Notes what ``delta``, arriving now, says of the call."""
        if delta.text and self.first_text_seconds is None:
            self.first_text_seconds = now_seconds
        if delta.usage is not None:
            self.usage = add_usage(self.usage, delta.usage)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        if delta.response_metadata is not None:
            self.model_name = _name(delta.response_metadata) or self.model_name

    @property
    def text(self) -> str:
        """The text of the call so far."""
        return "".join(self.shown)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds

    def trace(self) -> CallTrace:
        """The call as it goes into the answer's trace."""
        return CallTrace(
            start_seconds=self.start_seconds,
            first_text_seconds=self.first_text_seconds,
            end_seconds=self.end_seconds,
            usage=self.usage,
            finish_reason=self.finish_reason,
        )


def total_usage(calls: Iterable[Call]) -> UsageMetadata | None:
    """The tokens of all ``calls`` together, ``None`` if none of them reported any."""
    reported = [call.usage for call in calls if call.usage is not None]
    return reduce(add_usage, reported) if reported else None


def _name(response_metadata: dict[str, Any]) -> str | None:
    name = response_metadata.get("model_name") or response_metadata.get("model")
    return name if isinstance(name, str) else None
