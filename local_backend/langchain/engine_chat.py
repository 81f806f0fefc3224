"""A chat model whose calls are rows of an engine: one at a time, streamed, or in batches that start at once.

Knows rows and their updates. Does not know how prompts and replies are formatted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Self, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list, merge_configs
from pydantic import ConfigDict, Field
from tqdm.auto import tqdm

from local_backend.engine.engine import Engine
from local_backend.langchain.reply import Reply

# Each thread waits for one answer of a batch, so the scheduler chooses among at most this many rows.
_MAX_BATCH_THREADS = 512
# A smaller or faster batch shows no progress bar.
_LEAST_SHOWN_INPUTS, _LEAST_SHOWN_SECONDS = 33, 2.0

Messages = list[BaseMessage]
Stop = list[str] | None


class _CountedBatch(BaseCallbackHandler):
    """A batch whose answers and errors are counted in ``bar``, from any thread; ``configs`` are its calls."""

    run_inline = True

    def __init__(self, config: Any, num_inputs: int, *, shown: bool) -> None:
        configs = get_config_list(config, num_inputs)
        self.configs = [merge_configs(each, {"callbacks": [self]}) for each in configs]
        self.bar = tqdm(
            total=num_inputs,
            unit="answer",
            delay=_LEAST_SHOWN_SECONDS,
            # None: a terminal or a notebook shows it, a pipe does not.
            disable=None if shown and num_inputs >= _LEAST_SHOWN_INPUTS else True,
        )

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        with self.bar.get_lock():
            self.bar.update()

    on_llm_error = on_llm_end


class EngineChatModel(BaseChatModel):
    """A chat model that decodes with an engine; see :class:`~local_backend.ChatLocal`."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    engine: Engine = Field(exclude=True, repr=False)
    model_name: str = "local"
    progress: bool = True

    def close(self) -> None:
        """Close the engine; calls still running raise."""
        self.engine.close()

    def splitting_gain(self, num_answers: int, num_rows: int, num_parts: int, part_tokens: int) -> float:
        """As of ``ForwardCost``; rows of the engine besides the ``num_rows`` of these answers are answers."""
        num_answers += max(0, self.engine.num_wanted_rows - num_rows)
        costs = self.engine.width_costs if num_answers > 1 else None  # a single one gains
        return costs.splitting_gain(num_answers, num_parts, part_tokens) if costs else 2.0

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()  # which shares the engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer all inputs at once; results in the order of the inputs.

        The engine's scheduler orders them. LangChain's own ``batch`` would run only a few at a time.
        """
        batch = _CountedBatch(config, len(inputs), shown=self.progress)
        # LangChain takes the number of threads from the first configuration.
        if inputs and batch.configs[0].get("max_concurrency") is None:
            most = max(_MAX_BATCH_THREADS, 4 * self.engine.max_rows)
            batch.configs[0]["max_concurrency"] = min(len(inputs), most)
        with batch.bar:
            return super().batch(inputs, batch.configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """:meth:`batch` in the running event loop."""
        batch = _CountedBatch(config, len(inputs), shown=self.progress)
        with batch.bar:
            return await super().abatch(inputs, batch.configs, return_exceptions=return_exceptions, **kwargs)

    def _generate(
        self, messages: Messages, stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        reply = Reply(self, messages, stop, kwargs)
        return reply.result([*self.engine.stream(reply.row)][-1])

    async def _agenerate(
        self, messages: Messages, stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        reply = Reply(self, messages, stop, kwargs)
        return reply.result([update async for update in self.engine.astream(reply.row)][-1])

    def _stream(
        self, messages: Messages, stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        reply = Reply(self, messages, stop, kwargs)
        for update in self.engine.stream(reply.row):
            if (chunk := reply.chunk(update)) is not None:
                yield chunk

    async def _astream(
        self, messages: Messages, stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        reply = Reply(self, messages, stop, kwargs)
        async with aclosing(cast("Any", self.engine.astream(reply.row))) as updates:
            async for update in updates:
                if (chunk := reply.chunk(update)) is not None:
                    yield chunk
