"""``SkeletonOfThought``: answers written point by point in parallel, as one Runnable.

Skeleton-of-Thought (arXiv 2307.15337) asks a model first for the outline of an answer, then for all of its
points at once. Here it is a Runnable that takes what a chat model takes and returns what one returns, so
it stands wherever a chat model stands. The algorithm is in :mod:`sot_chains.answering.answer`; this module
gives it LangChain's six ways of being called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManager, AsyncCallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage
from langchain_core.prompt_values import ChatPromptValueConcrete, StringPromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import (
    ensure_config,
    get_async_callback_manager_for_config,
    get_config_list,
    patch_config,
)
from langchain_core.utils.uuid import uuid7

from sot_chains.answering.answer import Answer, PointDelta
from sot_chains.answering.point_stream import PointStream
from sot_chains.answering.reading_order import gather_or_cancel
from sot_chains.calls.budget import Budget
from sot_chains.calls.options import (
    POLICIES,
    CallOptions,
    OnFailure,
    SotOptions,
    calls_limit,
    positive_seconds,
    trace_to_resume,
)
from sot_chains.calls.rate_limits import Limits, limiter_for, next_question
from sot_chains.calls.retries import Retries
from sot_chains.calls.usage import Price, fetch_vocabulary
from sot_chains.providers import Provider, VendorProvider, blocking, provider_of
from sot_chains.providers.callbacks import (
    NO_CALLBACKS,
    chat_run,
    nobody_listens,
    wants_tokens,
    without_callbacks,
)
from sot_chains.text.conversation import Conversation
from sot_chains.text.prompts import Prompts

if TYPE_CHECKING:
    from sot_chains.router.route import Route

# LangGraph leaves runs with this tag out of its "messages" stream: points arrive in no order, and the
# run "answer" shows them in order.
_TAG_NOSTREAM = "nostream"


class SkeletonOfThought(Runnable[LanguageModelInput, AIMessage]):
    r"""Answers a question by outlining it first and writing all points of the outline at once.

    Takes a string, messages or a prompt value; the last human message is the question, and what stands
    before it reaches every model call. Returns an ``AIMessage`` whose ``usage_metadata`` is the sum over all
    calls and whose ``response_metadata["sot"]`` is a :class:`~sot_chains.calls.trace.SotTrace`. If the
    model returns no usable outline, it answers in one piece, and ``route`` in the trace says so.

    Keyword arguments of a call (``stop``, ``temperature``) go to the model, except two:
    ``deadline_seconds`` is that of this call, and ``resume`` the trace of an earlier answer to the same
    question (``message.response_metadata["sot"]``, or the ``trace`` of a :class:`ProviderError`), of which
    only what is missing is written; for a batch, one for each input or ``None``.
    ``config["max_concurrency"]`` bounds the model calls in flight, of one answer or of a whole batch.
    Synchronous calls run on a background event loop, so they work inside a running one, too.

    Args:
        model: A LangChain chat model, another Runnable that answers messages with a message,
            ``"openai:MODEL"`` or ``"anthropic:MODEL"``.
        router: Decides which questions are answered this way, see :mod:`sot_chains.router`; the others are
            answered plainly. All are, by default.
        prompts: The requests sent to the model; ``Prompts.short()`` costs less with strong models.
        prefill: Whether replies are begun for the model, which keeps small ones on track. By default
            if the model is known to continue them, or until it has said that it does not.
        max_points: How many points an answer has at most; further ones are left away.
        points_per_call: How many points one call writes: more of them cost less and take longer.
        eager: Whether a point is begun as soon as its line of the outline is complete, which is faster; its
            request then shows the outline so far. A ``budget`` switches it off.
        on_failure: What to do about a point whose call fails. ``"retry"`` tries again and at last returns
            the answer without it, marked in the trace; ``"omit"`` leaves it out; ``"plain"`` answers the
            question in one piece instead, unless text has been read; ``"raise"`` raises. A function of point
            and error may choose among them. A server that is merely busy is asked again under all of them.
        retries: How often a call is tried, and with which pauses.
        deadline_seconds: After how long an answer is returned with what is there, marked in the trace.
        limits: What the account may send, shared by all chains that use it.
        prices: What models cost, by name, so that the trace tells the price.
        budget: What answers may cost.
        **options: For a model given by name: ``base_url``, ``api_key`` and so on, see
            :func:`~sot_chains.providers.provider_of`.

    Raises:
        ValueError: A number is too small, or the model's name is not supported. When called: there is
            no question, or it is empty.
        TypeError: ``model`` is none of the above. When called: the input is not a chat model's.
        ProviderError: When called: the model could not be asked, or nothing could be written. Its ``trace``
            holds what had been, for ``resume``.
        DeadlineError: When called: the deadline passed before there was anything to return.
        BudgetError: When called: the budget is too small.

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
        router: Runnable[LanguageModelInput, Route] | None = None,
        prompts: Prompts | None = None,
        prefill: bool | None = None,
        max_points: int | None = None,
        points_per_call: int = 1,
        eager: bool = False,
        on_failure: OnFailure = "retry",
        retries: Retries | None = None,
        deadline_seconds: float | None = None,
        limits: Limits | None = None,
        prices: Mapping[str, Price] | Price | None = None,
        budget: Budget | None = None,
        **options: Any,
    ) -> None:
        if max_points is not None and max_points < 2:
            raise ValueError(f"max_points must be at least 2, got {max_points}: one point is a plain answer")
        if points_per_call < 1:
            raise ValueError(f"points_per_call must be at least 1, got {points_per_call}")
        if not callable(on_failure) and on_failure not in POLICIES:
            raise ValueError(f"on_failure must be one of {POLICIES} or a function, got {on_failure!r}")
        if isinstance(model, str) and "max_retries" in options:  # as the SDKs call it, but counted by us
            retries = retries or Retries(max_attempts=options.pop("max_retries") + 1)
        provider = provider_of(model, **options)
        account = provider.account if isinstance(provider, VendorProvider) else None
        self.deadline_seconds = positive_seconds(deadline_seconds)
        self.method = SotOptions(
            provider=provider,
            prompts=prompts or Prompts(),
            prefill=prefill,
            max_points=max_points,
            points_per_call=points_per_call,
            eager=eager,
            on_failure=on_failure,
            retries=retries or Retries(),
            limiter=limiter_for(limits, account),
            prices=prices,
            budget=budget,
            router=router,
        )
        if budget is not None or (self.method.limiter and self.method.limiter.counts_tokens):
            fetch_vocabulary()
        if budget is not None and budget.price is not None and self.method.price is None:
            raise ValueError(
                f"a budget in money needs the price of {provider.model_name!r}: prices={{...: Price(...)}}"
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
        return await self._write(input, config, kwargs, limit=calls_limit(config))

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
            child = run_manager.get_child()
            answer, pieces = self._begin(
                question,
                config,
                child,
                run_manager.run_id,
                kwargs,
                limit=calls_limit(config),
                is_streamed=True,
            )
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
            lambda on_arrival: self._write(
                input, config, kwargs, limit=calls_limit(config), on_arrival=on_arrival
            )
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
        calls = calls_limit(configs[0])
        # Only as many answers are begun as calls may be in flight: the calls then go to finishing answers.
        answers = calls_limit(configs[0]) or nullcontext()
        resume = kwargs.pop("resume", None)
        traces = resume if isinstance(resume, list) else [resume] * len(inputs)
        if len(traces) != len(inputs):
            raise ValueError(f"resume has {len(traces)} traces for {len(inputs)} inputs; give one for each")

        async def write(question: LanguageModelInput, config: RunnableConfig, trace: Any) -> AIMessage:
            async with answers:
                try:
                    return await self._write(question, config, {**kwargs, "resume": trace}, limit=calls)
                except Exception as error:  # as LangChain's batch: any error is one input's outcome
                    if return_exceptions:
                        return cast("AIMessage", error)  # as Runnable.abatch declares it
                    raise

        return await gather_or_cancel(map(write, inputs, configs, traces))

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answers ``input``; see :meth:`ainvoke`."""
        return blocking.run(lambda: self.ainvoke(input, config, **kwargs))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Yields the answer to ``input`` in reading order as it is written; see :meth:`astream`."""
        yield from blocking.iterate(lambda: self.astream(input, config, **kwargs))

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers all ``inputs``; see :meth:`abatch`."""
        return blocking.run(
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
        """Writes one answer to its end, as a run, if anybody wants to hear of one."""

        async def write(
            question: LanguageModelInput,
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> AIMessage:
            return await finish(question, config, run_manager.get_child(), run_manager.run_id)

        async def finish(
            question: LanguageModelInput, config: RunnableConfig, child: AsyncCallbackManager, run_id: UUID
        ) -> AIMessage:
            answer, pieces = self._begin(
                question, config, child, run_id, kwargs, limit=limit, on_arrival=on_arrival
            )
            async with aclosing(pieces):
                async for _ in pieces:
                    pass
            return answer.message()

        if get_async_callback_manager_for_config(config).handlers:
            return await self._acall_with_config(write, question, config)
        return await finish(question, config, NO_CALLBACKS, config.get("run_id") or uuid7())

    def _begin(
        self,
        question: LanguageModelInput,
        config: RunnableConfig,
        child: AsyncCallbackManager,
        run_id: UUID,
        kwargs: dict[str, Any],
        *,
        limit: asyncio.Semaphore | None,
        is_streamed: bool = False,
        on_arrival: Callable[[PointDelta], None] | None = None,
    ) -> tuple[Answer, AsyncGenerator[str, None]]:
        """An answer under the run with ``run_id``, and the text to read for it to be written."""
        conversation = Conversation.of(question)
        parameters = dict(kwargs)
        deadline_seconds = positive_seconds(parameters.pop("deadline_seconds", None)) or self.deadline_seconds
        resume = trace_to_resume(parameters.pop("resume", None))
        shown_config = without_callbacks(patch_config(config, callbacks=child))
        setting = CallOptions(
            config={**shown_config, "tags": [*shown_config.get("tags", []), _TAG_NOSTREAM]},
            parameters=parameters,
            limit=limit,
            message_id=f"lc_run--{run_id}",
            is_watched=is_streamed or on_arrival is not None or wants_tokens(shown_config),
            deadline_seconds=deadline_seconds,
            question_number=next_question(),
            resume=resume,
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
        if nobody_listens(config):
            async with aclosing(answer.in_reading_order(on_arrival)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        run = chat_run(config, conversation.messages, model=self.get_name(), message_id=answer.message_id)
        async with run as listeners, aclosing(answer.in_reading_order(on_arrival)) as pieces:
            async for piece in pieces:
                if listeners:
                    await listeners.wrote(piece)
                yield piece


async def _just(value: LanguageModelInput) -> AsyncIterator[LanguageModelInput]:
    yield value
