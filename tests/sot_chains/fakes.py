"""Models for tests. What they answer depends on what they are asked, never on the order of arrival."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import agenerate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from pydantic import Field, PrivateAttr

from sot_chains import Delta, ModelProfile, ProviderError, SkeletonOfThought
from sot_chains.prompts.profile import CHINESE, ENGLISH, SHORT_CHINESE, SHORT_ENGLISH

QUESTION = "How do I sleep well?"
OUTLINE = "1. Fixed hours\n2. Dark room\n3. Less coffee"
PLAIN = "Keep fixed hours in a dark room, with less coffee."
EXPANSIONS = {
    "Fixed hours": "Go to bed at the same time.",
    "Dark room": "Close the curtains.",
    "Less coffee": "Drink none after noon.",
}
ANSWER = (
    "1. **Fixed hours**: Go to bed at the same time.\n\n"
    "2. **Dark room**: Close the curtains.\n\n"
    "3. **Less coffee**: Drink none after noon."
)
USAGE = UsageMetadata(input_tokens=10, output_tokens=5, total_tokens=15)
BROKEN = ProviderError("the line broke", is_retryable=True)
REFUSED = ProviderError("no such model", status=404)
BUSY = ProviderError("come back later", is_retryable=True, was_refused=True, status=429)


# Without a plain answer beside the outline, of which the fakes know no length.
POINTS_ONLY = replace(ModelProfile.SMALL, short_answer=0)


def sot_of(model: Any, **options: Any) -> SkeletonOfThought:
    """A chain that always uses Skeleton-of-Thought."""
    return SkeletonOfThought(model, **{"router": "always", **options})


def is_skeleton_request(text: str) -> bool:
    templates = [t.skeleton for t in (ENGLISH, CHINESE, SHORT_ENGLISH, SHORT_CHINESE)]
    wordings = (max(wording.split("{question}"), key=len) for wording in templates)
    return any(wording[:40] in text for wording in wordings)


def point_asked_for(messages: Sequence[BaseMessage]) -> str | None:
    """The heading that a reply is begun with, or at the end of an expansion request; otherwise ``None``."""
    begun, text = re.match(r"\d+\. (.+)[:：]", messages[-1].text), asked(messages)
    if messages[-1].type == "ai" and begun:
        return begun[1]
    for mark in ("Your point is ", "你负责的要点是 "):
        _, found, rest = text.rpartition(mark)
        if found:
            return rest.partition("\n\n")[0].partition(". ")[2]
    return None


def asked(messages: Sequence[BaseMessage]) -> str:
    """The last message of the user."""
    return next(str(message.text) for message in reversed(messages) if message.type == "human")


def answer_to(messages: Sequence[BaseMessage]) -> str:
    """What the fakes answer by default: an outline, a point or a plain answer."""
    if (label := point_asked_for(messages)) is not None:
        return EXPANSIONS[label]
    return OUTLINE if is_skeleton_request(asked(messages)) else PLAIN


def what(messages: Sequence[BaseMessage]) -> str:
    """``"outline"``, the heading of the point asked for, or ``"plain"``."""
    return "outline" if is_skeleton_request(asked(messages)) else point_asked_for(messages) or "plain"


def words(text: str) -> list[str]:
    """``text`` in pieces that end with a space or the end."""
    return [piece for piece in text.replace(" ", " \0").split("\0") if piece]


class PacedChatModel(BaseChatModel):
    """Streams ``answer(messages)`` word by word, up to a stop string.

    ``pause`` says how long it waits before each word: seconds, or a function of what it is asked. Counts the
    calls that are going on. Usage is one token a message in, one a word out.
    """

    answer: Callable[[Sequence[BaseMessage]], str] = answer_to
    pause: float | Callable[[Sequence[BaseMessage]], float] = 0.0
    fail: Callable[[Sequence[BaseMessage]], bool] = Field(default=lambda messages: False)
    supports_assistant_prefill: bool = False
    model_name: str = "paced"

    _num_running: int = PrivateAttr(default=0)
    _most_running: int = PrivateAttr(default=0)
    _requests: list[list[BaseMessage]] = PrivateAttr(default_factory=list)
    _parameters: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "paced"

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def most_running(self) -> int:
        return self._most_running

    @property
    def requests(self) -> list[list[BaseMessage]]:
        return self._requests

    @property
    def parameters(self) -> list[dict[str, Any]]:
        return self._parameters

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        self._requests.append(messages)
        self._parameters.append({"stop": stop, **kwargs})
        self._num_running += 1
        self._most_running = max(self._most_running, self._num_running)
        pause = self.pause(messages) if callable(self.pause) else self.pause
        try:
            text = self.answer(messages)
            for one in stop or ():
                text = text.partition(one)[0]
            pieces = words(text)
            for piece in pieces:
                await asyncio.sleep(pause)
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if self.fail(messages):
                    raise RuntimeError("the model broke")
            usage = UsageMetadata(
                input_tokens=len(messages),
                output_tokens=len(pieces),
                total_tokens=len(messages) + len(pieces),
            )
            last = AIMessageChunk(
                content="",
                usage_metadata=usage,
                response_metadata={"model_name": self.model_name, "finish_reason": "stop"},
            )
            yield ChatGenerationChunk(message=last)
        finally:
            self._num_running -= 1

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=self.answer(messages)))])


class LocalChatModel(PacedChatModel):
    """Offers what a local model offers, and so is asked as a small one."""

    supports_assistant_prefill: bool = True
    opens_reasoning: bool = False
    takes_grammars: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    stop: list[str] | None = None
    gain: float = 2.0

    def splitting_gain(self, num_answers: int, num_rows: int, num_parts: int, part_tokens: int) -> float:
        """As one answer gains, shared by all."""
        return self.gain / num_answers


@dataclass
class FakeProvider:
    """Streams ``answer(messages)`` word by word, and fails as it is told to, decided for each request.

    The functions get what a request asks for, see :func:`what`, and how often that was asked before.

    Attributes:
        fault: The error a request ends with.
        after_words: How many words come before the error.
        pause: Seconds before the first word of a request.
        between: Seconds between words, by what it asks for.
        reasoning: What comes before the answer.
        finish_reason: What a request ends with.
    """

    answer: Callable[[Sequence[BaseMessage]], str] = answer_to
    fault: Callable[[str, int], Exception | None] = lambda asked, attempt: None
    after_words: int = 0
    pause: Callable[[str, int], float] = lambda asked, attempt: 0.0
    between: Callable[[str], float] = lambda asked: 0.0
    reasoning: str = ""
    finish_reason: Callable[[str, int], str] = lambda asked, attempt: "stop"
    usage: UsageMetadata | None = field(default_factory=lambda: USAGE)
    supports_prefill: bool = False
    model_name: str = "fake"
    asked: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        asked = what(messages)
        attempt = self.asked[asked]
        self.asked[asked] += 1
        self.requests.append(str(messages[-1].text))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.pause(asked, attempt))
            error = self.fault(asked, attempt)
            if self.reasoning:
                yield Delta(reasoning=self.reasoning)
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


def other_tasks() -> set[asyncio.Task[Any]]:
    """The tasks of this loop besides the current one."""
    return asyncio.all_tasks() - {task for task in [asyncio.current_task()] if task}


async def nothing_runs(model: PacedChatModel | None = None, turns: int = 200) -> bool:
    """Whether no call and no task is left after a few turns of the loop, without any time going by.

    Closing an abandoned stream takes turns, and LangChain reports errors to handlers in separate tasks.
    """
    for _ in range(turns):
        if not other_tasks() and (model is None or model.num_running == 0):
            return True
        await asyncio.sleep(0)
    return False
