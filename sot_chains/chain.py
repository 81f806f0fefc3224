"""``SkeletonOfThought``: answers written point by point in parallel, as one Runnable.

Skeleton-of-Thought (arXiv 2307.15337) asks a model first for the outline of an answer, then for all of its
points at once. Here it is a Runnable that takes what a chat model takes and returns what one returns, so
it stands wherever a chat model stands. The algorithm is in :mod:`sot_chains.answer`; this module
gives it LangChain's six ways of being called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, nullcontext
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage
from langchain_core.prompt_values import ChatPromptValueConcrete, StringPromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list, patch_config

from sot_chains import background
from sot_chains.answer import Answer, Method, PointDelta, Setting
from sot_chains.conversation import Conversation
from sot_chains.fan_out import gather_or_cancel
from sot_chains.point_stream import PointStream
from sot_chains.prompts import Prompts
from sot_chains.providers import Provider, provider_of
from sot_chains.runs import chat_run

# LangGraph leaves runs with this tag out of its "messages" stream: points arrive in no order, and the
# run "answer" shows them in order.
_TAG_NOSTREAM = "nostream"


class SkeletonOfThought(Runnable[LanguageModelInput, AIMessage]):
    r"""Answers a question by outlining it first and writing all points of the outline at once.

    Takes a string, messages or a prompt value; the last human message is the question, and what stands
    before it reaches every model call. Returns an ``AIMessage`` whose ``usage_metadata`` is the sum over all
    calls and whose ``response_metadata["sot"]`` is a :class:`~sot_chains.trace.SotTrace`. Where no outline
    comes about the model answers plainly, and ``route`` in the trace says so.

    Keyword arguments of a call (``stop``, ``temperature``) go to the model. ``config["max_concurrency"]``
    bounds the model calls in flight, of one answer or of a whole batch. Synchronous calls run on a
    background event loop, so they work inside a running one, too.

    Args:
        model: A LangChain chat model, another Runnable that answers messages with a message, or
            ``"openai:MODEL"``.
        prompts: The requests sent to the model.
        prefill: Whether replies are begun for the model, which keeps small ones on track. By default
            if the model is known to continue them.
        max_points: How many points an answer has at most; further ones are left away.
        **options: For a model given by name: ``base_url``, ``api_key`` and so on, see
            :class:`~sot_chains.providers.openai.OpenAIProvider`.

    Raises:
        ValueError: ``max_points`` is below 2, or the model's name is not supported. When called: there is
            no question, or it is empty.
        TypeError: ``model`` is none of the above. When called: the input is not a chat model's.
        ProviderError: When called: the model named could not be asked.

    Example:
        >>> from langchain_core.language_models import FakeListChatModel
        >>> model = FakeListChatModel(responses=["1. Plan\n2. Rest", "Make a list.", "Take breaks."])
        >>> sot = SkeletonOfThought(model)
        >>> print(sot.invoke("How can I manage my time?").text)
        1. **Plan**: Make a list.
        <BLANKLINE>
        2. **Rest**: Take breaks.
    """

    def __init__(
        self,
        model: str | Runnable[Any, Any] | Provider,
        *,
        prompts: Prompts | None = None,
        prefill: bool | None = None,
        max_points: int | None = None,
        **options: Any,
    ) -> None:
        if max_points is not None and max_points < 2:
            raise ValueError(f"max_points must be at least 2, got {max_points}: one point is a plain answer")
        provider = provider_of(model, **options)
        self.method = Method(
            provider=provider,
            prompts=prompts or Prompts(),
            prefill=provider.supports_prefill if prefill is None else prefill,
            max_points=max_points,
        )

    @property
    def provider(self) -> Provider:
        """What the model calls are sent to."""
        return self.method.provider

    @property
    def InputType(self) -> Any:  # noqa: N802 - LangChain's name
        """What schemas say of the input: what a chat model takes."""
        return str | StringPromptValue | ChatPromptValueConcrete | list[AnyMessage]

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answers ``input``."""
        config = ensure_config(config)
        return await self._write(input, config, kwargs, limit=_limit(config))

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """Yields the answer to ``input`` in reading order as it is written.

        The first point streams while the others are written and kept. The last chunk carries usage and trace.
        """
        config = ensure_config(config)

        async def write(
            inputs: AsyncIterator[LanguageModelInput],
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> AsyncGenerator[AIMessageChunk, None]:
            (question,) = [value async for value in inputs]
            answer, pieces = self._begin(question, config, run_manager, kwargs, limit=_limit(config))
            async with aclosing(pieces):
                async for piece in pieces:
                    yield AIMessageChunk(content=piece, id=answer.message_id)
            yield answer.last_chunk()

        run = self._atransform_stream_with_config(_just(input), write, config)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", run)) as chunks:
            async for chunk in chunks:
                yield chunk

    def astream_points(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> PointStream:
        """Streams ``(point, text)`` as it is written, across all points at once, for displays.

        On the plain route ``point`` is ``None``. Read to its end, the stream holds the finished ``message``.
        """
        config = ensure_config(config)
        return PointStream(
            lambda on_arrival: self._write(input, config, kwargs, limit=_limit(config), on_arrival=on_arrival)
        )

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers all ``inputs``.

        ``max_concurrency`` (of the first config) bounds the model calls of all answers together. When one
        fails the others are cancelled, unless ``return_exceptions``: then its place holds the exception.
        """
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        calls = _limit(configs[0])
        # Only as many answers are begun as calls may be in flight: the calls then go to finishing answers.
        answers = _limit(configs[0]) or nullcontext()

        async def write(question: LanguageModelInput, config: RunnableConfig) -> AIMessage:
            async with answers:
                try:
                    return await self._write(question, config, kwargs, limit=calls)
                except Exception as error:
                    if return_exceptions:
                        return cast("AIMessage", error)  # as Runnable.abatch declares it
                    raise

        return await gather_or_cancel(map(write, inputs, configs))

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answers ``input``; see :meth:`ainvoke`."""
        return background.run(lambda: self.ainvoke(input, config, **kwargs))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Yields the answer to ``input`` in reading order as it is written; see :meth:`astream`."""
        yield from background.iterate(lambda: self.astream(input, config, **kwargs))

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers all ``inputs``; see :meth:`abatch`."""
        return background.run(
            lambda: self.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        )

    async def _write(
        self,
        question: LanguageModelInput,
        config: RunnableConfig,
        kwargs: dict[str, Any],
        *,
        limit: asyncio.Semaphore | None,
        on_arrival: Callable[[PointDelta], None] | None = None,
    ) -> AIMessage:
        """Writes one answer to its end, as a run."""

        async def write(
            question: LanguageModelInput,
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> AIMessage:
            answer, pieces = self._begin(
                question, config, run_manager, kwargs, limit=limit, on_arrival=on_arrival
            )
            async with aclosing(pieces):
                async for _ in pieces:
                    pass
            return answer.message()

        return await self._acall_with_config(write, question, config)

    def _begin(
        self,
        question: LanguageModelInput,
        config: RunnableConfig,
        run_manager: AsyncCallbackManagerForChainRun,
        kwargs: dict[str, Any],
        *,
        limit: asyncio.Semaphore | None,
        on_arrival: Callable[[PointDelta], None] | None = None,
    ) -> tuple[Answer, AsyncGenerator[str, None]]:
        """An answer under the run of ``run_manager``, and the text to read for it to be written."""
        conversation = Conversation.of(question)
        shown_config = patch_config(config, callbacks=run_manager.get_child())
        setting = Setting(
            config={**shown_config, "tags": [*shown_config.get("tags", []), _TAG_NOSTREAM]},
            parameters=kwargs,
            limit=limit,
            message_id=f"lc_run--{run_manager.run_id}",
        )
        answer = Answer(self.method, conversation, setting)
        shown_config["run_name"] = "answer"
        return answer, self._shown(answer, conversation, shown_config, on_arrival)

    async def _shown(
        self,
        answer: Answer,
        conversation: Conversation,
        config: RunnableConfig,
        on_arrival: Callable[[PointDelta], None] | None,
    ) -> AsyncGenerator[str, None]:
        """The text of ``answer`` in reading order, shown to handlers as what one chat model writes.

        Without this run a handler would see the points only as they come, all mixed. It reports no usage:
        the runs of the calls do.
        """
        run = chat_run(config, conversation.messages, model=self.get_name(), message_id=answer.message_id)
        async with run as listeners, aclosing(answer.in_reading_order(on_arrival)) as pieces:
            async for piece in pieces:
                if listeners:
                    await listeners.wrote(piece)
                yield piece


def _limit(config: RunnableConfig) -> asyncio.Semaphore | None:
    """Bounds the model calls that may be in flight under ``config``.

    Raises:
        ValueError: ``max_concurrency`` is below 1, which would wait forever.
    """
    if (bound := config.get("max_concurrency")) is None:
        return None
    if bound < 1:
        raise ValueError(f'config["max_concurrency"] must be at least 1, got {bound}')
    return asyncio.Semaphore(bound)


async def _just(value: LanguageModelInput) -> AsyncIterator[LanguageModelInput]:
    yield value
