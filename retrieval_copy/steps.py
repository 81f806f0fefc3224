"""Runs the steps of a generator, blocking or awaiting, and collects a streamed reply.

The algorithm is a generator: it yields a step and receives the outcome or the error. So it is written once
for synchronous and asynchronous calls.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableConfig

from retrieval_copy.conversation import text_of
from sot_chains.providers.loops import LoopGuard

_log = logging.getLogger(__name__)

# LangGraph omits runs with this tag from its "messages" stream: the standalone question is not an answer.
_TAG_NOSTREAM = "nostream"

T = TypeVar("T")
StepT = TypeVar("StepT")
ResultT = TypeVar("ResultT")


def drive(steps: Generator[StepT, Any, ResultT], perform: Callable[[StepT], Any]) -> ResultT:
    """Runs ``steps`` to the end with ``perform`` and returns its result."""
    try:
        step = next(steps)
        while True:
            try:
                outcome = perform(step)
            except Exception as error:  # the generator handles it or raises it
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as end:
        result: ResultT = end.value
        return result


async def adrive(
    steps: Generator[StepT, Any, ResultT], perform: Callable[[StepT], Awaitable[Any]]
) -> ResultT:
    """Runs ``steps`` to the end, awaiting ``perform``, and returns its result."""
    try:
        step = next(steps)
        while True:
            try:
                outcome = await perform(step)
            except Exception as error:  # the generator handles it or raises it
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as end:
        result: ResultT = end.value
        return result


class StreamedReply:
    """Collects the pieces of a streamed reply.

    Args:
        guard: Passes the text on, until the model repeats itself.
    """

    def __init__(self, guard: LoopGuard | None = None) -> None:
        self._chunks: list[AIMessageChunk] = []
        self._guard = guard

    def add(self, piece: object) -> str:
        """Adds the next piece and returns the text that is sure to stay.

        Raises:
            TypeError: The piece is neither a message nor text.
        """
        text = text_of(piece)
        message = piece if isinstance(piece, AIMessage) else AIMessage(text)
        self._chunks.append(
            AIMessageChunk(
                content=text,
                id=message.id,
                usage_metadata=message.usage_metadata,
                response_metadata=message.response_metadata,
            )
        )
        if self._guard is None:
            return text
        return "" if self._guard.is_over else self._guard.feed(text)

    def end(self) -> str:
        """The text held back so far, after the last piece."""
        return "" if self._guard is None or self._guard.is_over else self._guard.end()

    @property
    def id(self) -> str | None:
        """The message id of the reply."""
        return next((chunk.id for chunk in self._chunks if chunk.id), None)

    def message(self) -> AIMessage:
        """The whole reply as one message, as the model wrote it."""
        whole = AIMessageChunk(content="") + self._chunks
        return AIMessage(
            content="".join(str(chunk.content) for chunk in self._chunks),
            id=self.id,
            usage_metadata=whole.usage_metadata,
            response_metadata=whole.response_metadata,
        )


def last_chunks(message: AIMessage, text: str) -> Iterator[AIMessageChunk]:
    """The end of a stream: ``text``, if any, and a chunk that carries what else ``message`` holds."""
    if text:
        yield AIMessageChunk(content=text, id=message.id)
    yield AIMessageChunk(
        content="",
        id=message.id,
        usage_metadata=message.usage_metadata,
        response_metadata=message.response_metadata,
        chunk_position="last",
    )


async def just(value: T) -> AsyncIterator[T]:
    """A stream of one value."""
    yield value


def aside(config: RunnableConfig, name: str | None = None) -> RunnableConfig:
    """``config`` for a call whose reply is not the answer, or not sure to be it."""
    tags = [*(config.get("tags") or []), _TAG_NOSTREAM]
    return {**config, "tags": tags, **({"run_name": name} if name else {})}


@contextmanager
def failure_logged() -> Iterator[None]:
    """Logs a failure to store an answer; the answer is returned all the same."""
    try:
        yield
    except Exception:  # whatever a store raises: the user has the answer
        _log.warning("the answer could not be kept for similar questions", exc_info=True)
