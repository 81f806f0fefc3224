"""Runs the steps of a generator, blocking or awaiting, and collects a streamed reply.

The algorithm is a generator: it yields a step and receives the outcome or the error. So it is written once
for synchronous and asynchronous calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AIMessageChunk

from retrieval_copy.answering import text_of

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
    """Collects the pieces of a streamed reply."""

    def __init__(self) -> None:
        self._chunks: list[AIMessageChunk] = []

    def add(self, piece: object) -> str:
        """Adds the next piece and returns its text.

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
        return text

    @property
    def id(self) -> str | None:
        """The message id of the reply."""
        return next((chunk.id for chunk in self._chunks if chunk.id), None)

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(str(chunk.content) for chunk in self._chunks)

    def message(self) -> AIMessage:
        """The whole reply as one message."""
        whole = AIMessageChunk(content="") + self._chunks
        return AIMessage(
            content=self.text,
            id=self.id,
            usage_metadata=whole.usage_metadata,
            response_metadata=whole.response_metadata,
        )


def last_chunk(message: AIMessage) -> AIMessageChunk:
    """The last chunk of a stream, which carries everything of ``message`` besides its text."""
    return AIMessageChunk(
        content="",
        id=message.id,
        usage_metadata=message.usage_metadata,
        response_metadata=message.response_metadata,
        chunk_position="last",
    )


async def just(value: T) -> AsyncIterator[T]:
    """A stream of one value."""
    yield value
