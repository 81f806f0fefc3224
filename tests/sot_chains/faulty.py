"""A provider that fails as it is told to, decided for each request."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig

from sot_chains import Delta, ProviderError
from tests.sot_chains.fakes import (
    answer_to,
    is_skeleton_request,
    point_asked_for,
    words,
)

USAGE = UsageMetadata(input_tokens=10, output_tokens=5, total_tokens=15)
BROKEN = ProviderError("the line broke", is_retryable=True)
REFUSED = ProviderError("no such model", status=404)
BUSY = ProviderError("come back later", is_retryable=True, was_refused=True, status=429)


def what(messages: Sequence[BaseMessage]) -> str:
    """``"outline"``, the heading of the point asked for, or ``"plain"``."""
    text = next(str(message.text) for message in reversed(messages) if message.type == "human")
    return "outline" if is_skeleton_request(text) else point_asked_for(text) or "plain"


@dataclass
class FaultyProvider:
    """Streams word by word what the fakes answer; ``fault(what, attempt)`` may name an error.

    Attributes:
        fault: The error a request ends with, given what it asks for and how often that was asked before.
        after_words: How many words come before the error.
        pause: Seconds before the first word of a request, by what it asks for and how often before.
        between: Seconds between words.
        finish_reason: What a request ends with, by what it asks for and how often before.
    """

    fault: Callable[[str, int], Exception | None] = lambda asked, attempt: None
    after_words: int = 0
    pause: Callable[[str, int], float] = lambda asked, attempt: 0.0
    between: Callable[[str], float] = lambda asked: 0.0
    finish_reason: Callable[[str, int], str] = lambda asked, attempt: "stop"
    answer: Callable[[Sequence[BaseMessage]], str] = answer_to
    usage: UsageMetadata | None = field(default_factory=lambda: USAGE)
    supports_prefill: bool = False
    model_name: str = "faulty"
    asked: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    num_running: int = 0

    async def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        asked = what(messages)
        attempt = self.asked[asked]
        self.asked[asked] += 1
        self.requests.append(str(messages[-1].text))
        self.num_running += 1
        try:
            await asyncio.sleep(self.pause(asked, attempt))
            error = self.fault(asked, attempt)
            for number, piece in enumerate(words(self.answer(messages))):
                if error and number == self.after_words:
                    raise error
                yield Delta(piece)
                await asyncio.sleep(self.between(asked))
            if error:
                raise error
            yield Delta(usage=self.usage, finish_reason=self.finish_reason(asked, attempt))
        finally:
            self.num_running -= 1
