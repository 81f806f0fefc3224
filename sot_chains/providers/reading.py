"""Reads one reply from the JSON of its events, whatever a server leaves out, repeats or adds.

Knows what all wires have in common: text, reasoning, counts of tokens, and an end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from langchain_core.messages.ai import UsageMetadata

from sot_chains.providers.base import Delta

_NO_REASON = frozenset({"", "null", "none"})


class Reading(ABC):
    """A reply while it is read.

    Args:
        model: The name of the model that was asked.

    Attributes:
        is_over: Whether the server has said that nothing follows.
        finish_reason: Why the reply ended, as the server reports it.
        has_text: Whether there is any text.
        has_reasoning: Whether there is any reasoning beside it.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.is_over = False
        self.finish_reason: str | None = None
        self.has_text = self.has_reasoning = False
        self._writes_on = False
        self._half = ""

    def read(self, payload: Mapping[str, Any]) -> Delta | None:
        """What an event adds to the text and the reasoning, if anything."""
        was_finished = self.finish_reason is not None
        text, reasoning = self._take(payload)
        text = self._with_whole_characters(text)
        self._writes_on = self._writes_on or (was_finished and bool(text.strip()))
        self.has_text = self.has_text or bool(text.strip())
        self.has_reasoning = self.has_reasoning or bool(reasoning)
        return Delta(text, reasoning=reasoning) if text or reasoning else None

    @abstractmethod
    def _take(self, payload: Mapping[str, Any]) -> tuple[str, str]:
        """The text and the reasoning of an event. Takes note of the rest."""

    @property
    @abstractmethod
    def _usage(self) -> UsageMetadata | None:
        """The tokens of the reply."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been said."""
        return not self.has_text and not self.has_reasoning

    @property
    def is_whole(self) -> bool:
        """Whether the reply has come to its end.

        Some servers report a reason with every event. Then it says nothing, and the server's own end counts.
        """
        if self.is_over and not self.is_empty:
            return True
        return self.finish_reason is not None and not self._writes_on

    def last_delta(self) -> Delta:
        """What is known at the end, besides text that has been given out."""
        return Delta(
            text="\ufffd" if self._half else "",
            usage=self._usage,
            finish_reason=self.finish_reason,
            response_metadata={"model_name": self._model},
        )

    def _note(self, *, model: object = None, finish_reason: object = None) -> None:
        if isinstance(model, str) and model:
            self._model = model
        if isinstance(finish_reason, str) and finish_reason.strip().lower() not in _NO_REASON:
            self.finish_reason = finish_reason

    def _with_whole_characters(self, text: str) -> str:
        """``text``, where halves of a surrogate pair that came in two events are one character."""
        text, self._half = self._half + text, ""
        if text.isascii():
            return text
        if "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Counts:
    """Counts of tokens by name, of which the largest holds.

    Servers report them once, in parts, or as running totals.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, reported: object) -> None:
        """Notes the counts in a ``usage`` object."""
        for name, value in mapping(reported).items():
            if isinstance(value, Mapping):
                self.note(value)
            elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                self._counts[name] = max(int(value), self._counts.get(name, 0))

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def __contains__(self, name: str) -> bool:
        return name in self._counts


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> list[Mapping[str, Any]]:
    """The objects in ``value`` if it is an array, else none."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def text_in(value: object) -> str:
    """``value`` if it is text, or the text of its parts if it is an array of content."""
    if isinstance(value, str):
        return value
    return "".join(text_in(part.get("text")) for part in items(value) if part.get("type", "text") == "text")
