"""An answer as the run of one chat model, for handlers that listen. Knows callbacks; does not know calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing

from langchain_core.runnables import RunnableConfig

from sot_chains.answering.answer import Answer
from sot_chains.providers.callbacks import ChatRun, chat_run


async def shown_text(answer: Answer, config: RunnableConfig, name: str) -> AsyncGenerator[str, None]:
    """The text of ``answer`` in reading order, shown to handlers as what one chat model writes.

    Without this run a handler would see the points interleaved, in order of arrival. It reports no usage:
    the runs of the calls do.

    Args:
        answer: An answer that has not been begun.
        config: Of the run.
        name: Of the model in the run.
    """
    async with run_of(answer, config, name) as run, aclosing(answer.read()) as pieces:
        async for piece in pieces:
            if run:
                await run.wrote(piece)
            yield piece


def run_of(answer: Answer, config: RunnableConfig, name: str) -> AbstractAsyncContextManager[ChatRun | None]:
    """The run that shows ``answer``; ``None`` if nobody listens."""
    return chat_run(config, answer.conversation.messages, model=name, message_id=answer.message_id)
