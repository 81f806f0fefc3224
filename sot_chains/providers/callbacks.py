"""Reports a chat model run to LangChain's callback handlers without a ``BaseChatModel``.

Handlers and tracers follow a chat model through three callbacks: start, new token, end. This module makes
them, and only to handlers that implement them: LangChain would dispatch each to a thread per handler.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from functools import cache
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackHandler,
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
)
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig

from sot_chains.providers.base import Delta


class _Nobody(AsyncCallbackManager):
    """A callback manager without handlers, to which none will be added."""


NO_CALLBACKS: AsyncCallbackManager = _Nobody(handlers=[])


def without_callbacks(config: RunnableConfig) -> RunnableConfig:
    """``config`` for the calls of one answer, marked if it has no callback handlers."""
    callbacks = config.get("callbacks")
    if type(callbacks) is _Nobody:
        return config
    manager = AsyncCallbackManager.configure(inheritable_callbacks=callbacks)
    if manager.handlers:
        return config
    return {**config, "callbacks": _Nobody(handlers=[], parent_run_id=manager.parent_run_id)}


def nobody_listens(config: RunnableConfig) -> bool:
    """Whether ``config`` is marked as having no callback handlers."""
    return type(config.get("callbacks")) is _Nobody


def wants_tokens(config: RunnableConfig) -> bool:
    """Whether a callback handler implements ``on_llm_new_token``."""
    return not nobody_listens(config) and any(
        _hears(handler, "on_llm_new_token")
        for handler in AsyncCallbackManager.configure(inheritable_callbacks=config.get("callbacks")).handlers
    )


class ChatRun:
    """A chat model run in progress."""

    def __init__(self, manager: AsyncCallbackManagerForLLMRun, message_id: str | None) -> None:
        self._manager = manager
        self._token_manager = _narrowed(manager, "on_llm_new_token")
        self._message_id = message_id or f"lc_run--{manager.run_id}"
        self.pieces: list[str] = []  # of the text so far
        self.message: AIMessage | None = None  # the result, if it is more than the text

    async def wrote(self, text: str) -> None:
        """Reports ``text`` as the next piece of the answer."""
        self.pieces.append(text)
        if self._token_manager.handlers:
            chunk = AIMessageChunk(content=text, id=self._message_id)
            await self._token_manager.on_llm_new_token(text, chunk=ChatGenerationChunk(message=chunk))

    async def end(self) -> None:
        """Reports the end of the run."""
        await _narrowed(self._manager, "on_llm_end").on_llm_end(self._result())

    async def fail(self, error: BaseException) -> None:
        """Reports that the run failed with ``error``."""
        await _narrowed(self._manager, "on_llm_error").on_llm_error(error, response=self._result())

    def _result(self) -> LLMResult:
        message = self.message or AIMessage(content="".join(self.pieces), id=self._message_id)
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
    """Reports the enclosed block as a chat model run; yields ``None`` if there are no handlers."""
    if nobody_listens(config):
        yield None
        return
    parameters = dict(parameters or {})
    callbacks = config.get("callbacks")
    if isinstance(callbacks, AsyncCallbackManager):  # of a parent run, which is configured
        manager = callbacks.copy()
    else:
        manager = AsyncCallbackManager.configure(callbacks)
    manager.add_tags(config.get("tags") or [])
    metadata = config.get("metadata") or {}
    manager.add_metadata({**metadata, "ls_model_type": "chat", "ls_model_name": model})
    everybody = manager.handlers
    manager.handlers = [h for h in everybody if _hears(h, "on_chat_model_start") or _hears(h, "on_llm_start")]
    (run_manager,) = await manager.on_chat_model_start(
        {"name": model},
        [list(messages)],
        name=config.get("run_name") or model,
        run_id=config.get("run_id"),
        invocation_params={"model": model, **parameters},
        options=parameters,
        batch_size=1,
    )
    run_manager.handlers = everybody
    run = ChatRun(run_manager, message_id)
    try:
        yield run
    except BaseException as error:
        await run.fail(error)
        raise
    await run.end()


async def reported(
    deltas: AsyncGenerator[Delta, None],
    config: RunnableConfig,
    messages: Sequence[BaseMessage],
    *,
    model: str,
    parameters: Mapping[str, Any],
) -> AsyncGenerator[Delta, None]:
    """Yields the ``deltas`` of a completion, reported as a chat model run; see :func:`chat_run`."""
    async with chat_run(config, messages, model=model, parameters=parameters) as run, aclosing(deltas):
        usage: UsageMetadata | None = None
        metadata: dict[str, Any] = {"model_name": model}
        async for delta in deltas:
            if run and delta.text:
                await run.wrote(delta.text)
            usage = add_usage(usage, delta.usage) if delta.usage else usage
            metadata |= delta.response_metadata or {}
            if delta.finish_reason:
                metadata["finish_reason"] = delta.finish_reason
            yield delta
        if run:
            run.message = AIMessage("".join(run.pieces), usage_metadata=usage, response_metadata=metadata)


def _narrowed(manager: AsyncCallbackManagerForLLMRun, event: str) -> AsyncCallbackManagerForLLMRun:
    narrowed = copy(manager)
    narrowed.handlers = [handler for handler in manager.handlers if _hears(handler, event)]
    return narrowed


def _hears(handler: BaseCallbackHandler, event: str) -> bool:
    return event in vars(handler) or getattr(type(handler), event, None) not in _inherited(event)


@cache
def _inherited(event: str) -> tuple[object, ...]:
    return None, *(getattr(base, event, None) for base in (BaseCallbackHandler, AsyncCallbackHandler))
