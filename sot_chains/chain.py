"""``SkeletonOfThought``: answers written point by point in parallel, as one Runnable.

Skeleton-of-Thought (arXiv 2307.15337) asks a model first for the outline of an answer, then for all of its
points at once. Here it is a Runnable that takes what a chat model takes and returns what one returns, so
it stands wherever a chat model stands. The algorithm is in :mod:`sot_chains.answering.answer`; this module
gives it LangChain's six ways of being called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
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

from sot_chains.aio.blocking import BlockingRunnable
from sot_chains.aio.tasks import gather_or_cancel
from sot_chains.answering.answer import Answer
from sot_chains.answering.point_stream import PointStream
from sot_chains.answering.point_writer import PointDelta
from sot_chains.answering.shown import run_of, shown_text
from sot_chains.calls.options import (
    CallOptions,
    OnFailure,
    SotOptions,
    calls_limit,
    positive_seconds,
    trace_to_resume,
)
from sot_chains.calls.rate_limits import Limits, limiter_for, next_question
from sot_chains.calls.retries import Retries
from sot_chains.calls.usage import Price, load_vocabulary
from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.examples import Detail
from sot_chains.prompts.templates import Prompts
from sot_chains.providers import Provider, VendorProvider, provider_of
from sot_chains.providers.callbacks import (
    NO_CALLBACKS,
    wants_tokens,
    without_callbacks,
)

if TYPE_CHECKING:
    from sot_chains.router.route import Route

# LangGraph leaves runs with this tag out of its "messages" stream: the run "answer" shows points in order.
_TAG_NOSTREAM = "nostream"


class SkeletonOfThought(BlockingRunnable[LanguageModelInput, AIMessage]):
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
        router: Decides which questions are answered this way and which plainly, see :mod:`sot_chains.router`.
            ``"auto"`` are the rules and the trained router, some 10 ms; ``"always"`` always uses
            Skeleton-of-Thought.
        prompts: The requests sent to the model. By default short ones for models that are known to be strong
            by their name, and ones with examples as earlier turns for small local models and for servers
            other than the vendors' own.
        detail: How long points are: ``"brief"`` (a sentence), ``"normal"`` (two to four) or ``"full"``.
        loop_guard: Whether a text that repeats the same eight words three times is ended there. Small local
            models get a ``presence_penalty`` of 1.5 then, unless theirs is not 0.
        prefill: Whether replies are begun for the model, which keeps small ones on track. By default
            if the model is known to continue them, or until it has said that it does not.
        max_points: How many points an answer has at most; further ones are left away.
        dependencies: Whether the model may mark points that build on others ("4. Total cost (needs 2, 3)").
            Such a point is written once those are, and reads their text.
        conclusion: Whether the model concludes with all points in view; ``"first"`` shows that before them.
        eager: Whether a point is written once the next one begins in the outline, with the outline up to it.
            Pays where earlier points are longer or calls are limited (``benchmarks.frontier``).
        on_failure: What to do about a point whose call fails. ``"retry"`` tries again and at last returns
            the answer without it, marked in the trace; ``"omit"`` leaves it out; ``"plain"`` answers the
            question in one piece instead, unless text has been read; ``"raise"`` raises. A function of point
            and error may choose among them. A server that is merely busy is asked again under all of them.
        retries: How often a call is tried, and with which pauses.
        deadline_seconds: After how long an answer is returned with what is there, marked in the trace.
        limits: What the account may send, shared by all chains that use it.
        prices: What models cost, by name, so that the trace tells the price.
        **options: For a model given by name: ``base_url``, ``api_key`` and so on, see
            :func:`~sot_chains.providers.provider_of`.

    Raises:
        ValueError: A number is too small, or the model's name is not supported. When called: there is
            no question, or it is empty.
        TypeError: ``model`` is none of the above. When called: the input is not a chat model's.
        ProviderError: When called: the model could not be asked, or nothing could be written. Its ``trace``
            holds what had been, for ``resume``.
        DeadlineError: When called: the deadline passed before there was anything to return.

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
        router: Runnable[LanguageModelInput, Route] | Literal["auto", "always"] = "auto",
        prompts: Prompts | None = None,
        detail: Detail = "normal",
        loop_guard: bool = True,
        prefill: bool | None = None,
        max_points: int | None = None,
        dependencies: bool = False,
        conclusion: bool | Literal["first"] = False,
        eager: bool = False,
        on_failure: OnFailure = "retry",
        retries: Retries | None = None,
        deadline_seconds: float | None = None,
        limits: Limits | None = None,
        prices: Mapping[str, Price] | Price | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, str) and "max_retries" in options:  # as the SDKs call it, but counted by us
            retries = retries or Retries(max_attempts=options.pop("max_retries") + 1)
        from sot_chains.router import make_router  # NumPy and a tokenizer, which an import need not wait for

        provider = provider_of(model, **options)
        account = provider.account if isinstance(provider, VendorProvider) else None
        self.deadline_seconds = positive_seconds(deadline_seconds)
        self.method = SotOptions(
            provider=provider,
            prompts=prompts,
            detail=detail,
            loop_guard=loop_guard,
            prefill=prefill,
            max_points=max_points,
            dependencies=dependencies,
            conclusion=conclusion,
            eager=eager,
            on_failure=on_failure,
            retries=retries or Retries(),
            limiter=limiter_for(limits, account),
            prices=prices,
            router=make_router(router),
        )
        if self.method.limiter and self.method.limiter.counts_tokens:
            load_vocabulary()

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
        return await self._run(input, config, kwargs, limit=calls_limit(config))

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
            answer, shown = self._answer(question, config, run_manager, kwargs, limit=calls_limit(config))
            async with aclosing(shown_text(answer, shown, self.get_name())) as pieces:
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
            lambda on_arrival: self._run(
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
                    return await self._run(question, config, {**kwargs, "resume": trace}, limit=calls)
                except Exception as error:  # as LangChain's batch: any error is one input's outcome
                    if return_exceptions:
                        return cast("AIMessage", error)  # as Runnable.abatch declares it
                    raise

        return await gather_or_cancel(map(write, inputs, configs, traces))

    async def _run(
        self,
        question: LanguageModelInput,
        config: RunnableConfig,
        parameters: dict[str, Any],
        *,
        limit: asyncio.Semaphore | None,
        on_arrival: Callable[[PointDelta], None] | None = None,
    ) -> AIMessage:
        """Writes one answer, as a run if anybody listens."""
        write = partial(self._write, parameters=parameters, limit=limit, on_arrival=on_arrival)
        if get_async_callback_manager_for_config(config).handlers:
            return await self._acall_with_config(write, question, config)
        return await write(question, None, config)

    async def _write(
        self,
        question: LanguageModelInput,
        run_manager: AsyncCallbackManagerForChainRun | None,
        config: RunnableConfig,
        *,
        parameters: dict[str, Any],
        limit: asyncio.Semaphore | None,
        on_arrival: Callable[[PointDelta], None] | None,
    ) -> AIMessage:
        answer, shown = self._answer(
            question, config, run_manager, parameters, limit=limit, on_arrival=on_arrival
        )
        if wants_tokens(shown):
            async with aclosing(shown_text(answer, shown, self.get_name())) as pieces:
                async for _ in pieces:
                    pass
            return answer.message()
        async with run_of(answer, shown, self.get_name()) as run:
            message = await answer.write()
            if run:
                run.message = AIMessage(content=message.content, id=message.id)
            return message

    def _answer(
        self,
        question: LanguageModelInput,
        config: RunnableConfig,
        run_manager: AsyncCallbackManagerForChainRun | None,
        parameters: dict[str, Any],
        *,
        limit: asyncio.Semaphore | None,
        on_arrival: Callable[[PointDelta], None] | None = None,
    ) -> tuple[Answer, RunnableConfig]:
        """An answer that has not been begun, and the config of the run that shows it."""
        conversation = Conversation.of(question)
        parameters = dict(parameters)
        deadline_seconds = positive_seconds(parameters.pop("deadline_seconds", None)) or self.deadline_seconds
        resume = trace_to_resume(parameters.pop("resume", None))
        child = run_manager.get_child() if run_manager else NO_CALLBACKS
        run_id = run_manager.run_id if run_manager else config.get("run_id") or uuid7()
        shown = without_callbacks(patch_config(config, callbacks=child))
        setting = CallOptions(
            config={**shown, "tags": [*shown.get("tags", []), _TAG_NOSTREAM]},
            parameters=parameters,
            limit=limit,
            message_id=f"lc_run--{run_id}",
            deadline_seconds=deadline_seconds,
            question_number=next_question(),
            resume=resume,
        )
        return self._new_answer(conversation, setting, on_arrival), {**shown, "run_name": "answer"}

    def _new_answer(
        self,
        conversation: Conversation,
        setting: CallOptions,
        on_arrival: Callable[[PointDelta], None] | None,
    ) -> Answer:
        return Answer(self.method, conversation, setting, on_arrival)


async def _just(value: LanguageModelInput) -> AsyncIterator[LanguageModelInput]:
    yield value
