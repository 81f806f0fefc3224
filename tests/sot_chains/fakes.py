"""Models for tests. What they answer depends on what they are asked, never on the order of arrival."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from pydantic import Field, PrivateAttr

from sot_chains import Delta, SkeletonOfThought
from sot_chains.prompts.templates import CHINESE, ENGLISH, SHORT_CHINESE, SHORT_ENGLISH

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


def sot_of(model: Any, **options: Any) -> SkeletonOfThought:
    """A chain that always uses Skeleton-of-Thought."""
    return SkeletonOfThought(model, **{"router": "always", **options})


def is_skeleton_request(text: str) -> bool:
    templates = [t.skeleton for t in (ENGLISH, CHINESE, SHORT_ENGLISH, SHORT_CHINESE)]
    wordings = (max(wording.split("{question}"), key=len) for wording in templates)
    return any(wording[:40] in text for wording in wordings)


def point_asked_for(text: str) -> str | None:
    """The heading at the end of an expansion request, ``None`` for other requests."""
    for mark in ("Your point is ", "你负责的要点是 "):
        _, found, rest = text.rpartition(mark)
        if found:
            return rest.partition("\n\n")[0].partition(". ")[2]
    return None


def answer_to(messages: Sequence[BaseMessage]) -> str:
    """What the fakes answer by default: an outline, a point or a plain answer."""
    request = next(str(m.text) for m in reversed(messages) if m.type == "human")
    if (label := point_asked_for(request)) is not None:
        return EXPANSIONS[label]
    return OUTLINE if is_skeleton_request(request) else PLAIN


def words(text: str) -> list[str]:
    """``text`` in pieces that end with a space or the end."""
    return [piece for piece in text.replace(" ", " \0").split("\0") if piece]


class PacedChatModel(BaseChatModel):
    """Streams ``answer(messages)`` word by word.

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
            pieces = words(self.answer(messages))
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


class ScriptedProvider:
    """A provider without any machinery, for tests of what ours adds: streams after one pause."""

    supports_prefill = False
    model_name = "scripted"

    def __init__(
        self, answer: Callable[[Sequence[BaseMessage]], str] = answer_to, pause: float = 0.0
    ) -> None:
        self._answer = answer
        self._pause = pause

    async def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        await asyncio.sleep(self._pause)
        for piece in words(self._answer(messages)):
            yield Delta(piece)


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
