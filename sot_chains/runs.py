"""Telling LangChain's callbacks about a chat model run that no ``BaseChatModel`` performs.

Handlers, tracers, ``astream_events`` and LangGraph's "messages" stream mode learn of chat models by three
calls: started, wrote this, ended with that. This module makes those calls, and none if nobody listens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from langchain_core.callbacks import AsyncCallbackManager, AsyncCallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig


class ChatRun:
    """A chat model run while it is going on.

    Attributes:
        message: What the run answers with; to be set before it ends.
    """

    def __init__(self, manager: AsyncCallbackManagerForLLMRun, message_id: str) -> None:
        self._manager = manager
        self._message_id = message_id
        self._pieces: list[str] = []
        self.message: AIMessage | None = None

    async def wrote(self, text: str) -> None:
        """Announces ``text`` as the next piece of the answer."""
        self._pieces.append(text)
        chunk = AIMessageChunk(content=text, id=self._message_id)
        await self._manager.on_llm_new_token(text, chunk=ChatGenerationChunk(message=chunk))

    def result(self) -> LLMResult:
        """What to tell handlers at the end: ``message``, or else the text so far."""
        message = self.message or AIMessage(content="".join(self._pieces), id=self._message_id)
        return LLMResult(generations=[[ChatGeneration(message=message)]])


@asynccontextmanager
async def chat_run(
    config: RunnableConfig,
    messages: Sequence[BaseMessage],
    *,
    model: str,
    message_id: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> AsyncIterator[ChatRun | None]:
    """Announces the enclosed block as a chat model run, or is ``None`` when nobody listens.

    Args:
        config: Says who listens, the run's name, tags and metadata.
        messages: What the model is asked.
        model: The model's name.
        message_id: The id of the answer; one made from the run's id by default.
        parameters: What else the model is told. Handlers and tracers see it: nothing secret belongs here.
    """
    parameters = dict(parameters or {})
    manager = AsyncCallbackManager.configure(
        inheritable_callbacks=config.get("callbacks"),
        inheritable_tags=config.get("tags"),
        inheritable_metadata={
            **(config.get("metadata") or {}),
            "ls_model_type": "chat",
            "ls_model_name": model,
        },
    )
    if not manager.handlers:
        yield None
        return
    (run_manager,) = await manager.on_chat_model_start(
        {"name": model},
        [list(messages)],
        name=config.get("run_name") or model,
        run_id=config.get("run_id"),
        invocation_params={"model": model, **parameters},
        options=parameters,
        batch_size=1,
    )
    run = ChatRun(run_manager, message_id or f"lc_run--{run_manager.run_id}")
    try:
        yield run
    except BaseException as error:
        await run_manager.on_llm_error(error, response=run.result())
        raise
    await run_manager.on_llm_end(run.result())
