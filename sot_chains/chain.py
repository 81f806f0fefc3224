"""``SkeletonOfThought``: answers written point by point in parallel, as one Runnable.

Skeleton-of-Thought (arXiv 2307.15337) asks a model first for the outline of an answer, then for all of its
points at once. Here it is a Runnable that takes what a chat model takes and returns what one returns, so
it stands wherever a chat model stands. The algorithm is in :mod:`sot_chains.answering.answer`; this module
gives it LangChain's six ways of being called.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial
from typing import Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import (
    ensure_config,
    get_async_callback_manager_for_config,
    get_config_list,
    patch_config,
)
from langchain_core.utils.uuid import uuid7

from sot_chains.aio.blocking import gather_or_cancel
from sot_chains.answering.answer import Answer
from sot_chains.answering.chat_model import SkeletonChatModel
from sot_chains.answering.streams import PointStream, read_arrivals
from sot_chains.calls.options import AnswerOptions, CallOptions, OnFailure, Routing, choose_profile
from sot_chains.calls.prefix_cache import PromptCaching
from sot_chains.calls.rate_limits import Limits, limiter_for
from sot_chains.calls.usage import Price, load_vocabulary
from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.profile import Detail, ModelProfile
from sot_chains.providers import Provider, VendorProvider, make_provider
from sot_chains.providers.callbacks import NO_CALLBACKS, ChatRun, chat_run, wants_tokens, without_callbacks
from sot_chains.providers.errors import Retries
from sot_chains.providers.langchain import ChatRunnable


class SkeletonOfThought(ChatRunnable):
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
            ``"auto"`` are the rules and the trained router, some 10 ms; ``"always"`` asks for points always
            (the answer is plain if the model has no usable outline, or has answered before any is read),
            ``"unless_busy"`` unless a local model writes so much that points would take longer, and
            ``"never"`` not at all: plain answers under the same guards, to compare with.
        profile: How the model is asked: ``"small"``, ``"strong"`` or a
            :class:`~sot_chains.prompts.profile.ModelProfile`. By default ``"small"`` for local models and for
            servers other than the vendors' own, and ``"strong"`` for all others.
        detail: How long points are: ``"brief"`` (a sentence), ``"normal"`` (two to four) or ``"full"``.
        max_points: How many points an answer has at most; later ones are dropped.
        dependencies: Whether the model may mark points that build on others ("4. Total cost (needs 2, 3)").
            Such a point is written once those are, and reads their text.
        conclusion: Whether the model concludes with all points in view.
        eager: Whether a point is written once the next one begins in the outline, with the outline up to it.
            Pays where calls run in one batch or are limited; by default as the profile says.
        on_failure: What to do about a point whose call fails. ``"retry"`` tries again and at last returns
            the answer without it, marked in the trace; ``"omit"`` leaves it out; ``"plain"`` answers the
            question in one piece instead, unless text has been read; ``"raise"`` raises. A function of point
            and error may choose among them. A server that is merely busy is asked again under all of them.
        retries: How often a call is tried, and with which pauses.
        limits: What the account may send, shared by all chains that use it.
        prices: What models cost, by name, so that the trace tells the price.
        caching: How the vendor's prompt cache is used; by default where it is known to save.
        **options: For a model given by name: ``base_url``, ``api_key`` and so on, see
            :func:`~sot_chains.providers.make_provider`.

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

    def __init__(  # noqa: PLR0913 - one argument for each option
        self,
        model: str | Runnable[Any, Any] | Provider,
        *,
        router: Routing | Literal["auto"] = "auto",
        profile: ModelProfile | Literal["small", "strong"] | None = None,
        detail: Detail = "normal",
        max_points: int | None = None,
        dependencies: bool = False,
        conclusion: bool = False,
        eager: bool | None = None,
        on_failure: OnFailure = "retry",
        retries: Retries | None = None,
        limits: Limits | None = None,
        prices: Mapping[str, Price] | Price | None = None,
        caching: PromptCaching | None = None,
        **options: Any,
    ) -> None:
        if "deadline_seconds" in options:
            raise TypeError("deadline_seconds belongs to a call: use chain.bind(deadline_seconds=...)")
        if isinstance(model, str) and "max_retries" in options:  # as the SDKs call it, but counted by us
            retries = retries or Retries(max_attempts=options.pop("max_retries") + 1)
        from sot_chains.router import make_router  # NumPy and a tokenizer, which an import need not wait for

        provider = make_provider(model, **options)
        account = provider.account if isinstance(provider, VendorProvider) else None
        chosen = choose_profile(profile, provider)
        self.options = AnswerOptions(
            provider=provider,
            profile=chosen,
            detail=detail,
            max_points=max_points,
            dependencies=dependencies,
            conclusion=conclusion,
            eager=chosen.eager if eager is None else eager,
            on_failure=on_failure,
            retries=retries or Retries(),
            limiter=limiter_for(limits, account),
            prices=prices,
            caching=caching or PromptCaching(),
            router=make_router(router),
        )
        if self.options.limiter and self.options.limiter.counts_tokens:
            load_vocabulary()

    @property
    def provider(self) -> Provider:
        """What the model calls are sent to."""
        return self.options.provider

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answers ``input``."""
        config = ensure_config(config)
        return await self._run(input, config, CallOptions.of(kwargs, CallOptions.calls_limit(config)))

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """Yields the answer to ``input`` in reading order as it is written.

        The first point streams while the others are written and kept. The last chunk carries usage and trace.
        """
        config = ensure_config(config)
        call_options = CallOptions.of(kwargs, CallOptions.calls_limit(config))

        async def write(
            inputs: AsyncIterator[LanguageModelInput],
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> AsyncGenerator[AIMessageChunk, None]:
            (question,) = [value async for value in inputs]
            answer, shown = self._answer(question, config, run_manager, call_options)
            async with aclosing(_shown_text(answer, shown, self.get_name())) as pieces:
                async for piece in pieces:
                    yield AIMessageChunk(content=piece, id=call_options.message_id)
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
        return PointStream(read_arrivals(lambda tell: self.ainvoke(input, config, arrivals=tell, **kwargs)))

    def as_chat_model(self) -> SkeletonChatModel:
        """This chain as a ``BaseChatModel``, for what takes nothing else."""
        return SkeletonChatModel(chain=self, model_name=f"{self.provider.model_name}:sot")

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
        calls = CallOptions.calls_limit(configs[0])
        # Only as many answers are begun as calls may be in flight: the calls then go to finishing answers.
        answers = CallOptions.calls_limit(configs[0]) or nullcontext()
        resume = kwargs.pop("resume", None)
        traces = resume if isinstance(resume, list) else [resume] * len(inputs)
        if len(traces) != len(inputs):
            raise ValueError(f"resume has {len(traces)} traces for {len(inputs)} inputs; give one for each")

        async def write(question: LanguageModelInput, config: RunnableConfig, trace: Any) -> AIMessage:
            async with answers:
                try:
                    call_options = CallOptions.of({**kwargs, "resume": trace}, calls)
                    return await self._run(question, config, call_options)
                except Exception as error:  # as LangChain's batch: any error is one input's outcome
                    if return_exceptions:
                        return cast("AIMessage", error)  # as Runnable.abatch declares it
                    raise

        return await gather_or_cancel(map(write, inputs, configs, traces))

    async def _run(
        self, question: LanguageModelInput, config: RunnableConfig, call_options: CallOptions
    ) -> AIMessage:
        if get_async_callback_manager_for_config(config).handlers:
            write = partial(self._write, call_options=call_options)
            return await self._acall_with_config(write, question, config)
        return await self._answer(question, config, None, call_options)[0].write()

    async def _write(
        self,
        question: LanguageModelInput,
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        *,
        call_options: CallOptions,
    ) -> AIMessage:
        answer, shown = self._answer(question, config, run_manager, call_options)
        if wants_tokens(shown):
            async with aclosing(_shown_text(answer, shown, self.get_name())) as pieces:
                async for _ in pieces:
                    pass
            return answer.message()
        async with _shown_run(answer, shown, self.get_name()) as run:
            message = await answer.write()
            if run:
                run.message = AIMessage(content=message.content, id=message.id)
            return message

    def _answer(
        self,
        question: LanguageModelInput,
        config: RunnableConfig,
        run_manager: AsyncCallbackManagerForChainRun | None,
        call_options: CallOptions,
    ) -> tuple[Answer, RunnableConfig]:
        # What is answered plainly in any case may be an image, or a system message alone.
        conversation = Conversation.of(question, needs_question=self.options.router != "never")
        child = run_manager.get_child() if run_manager else NO_CALLBACKS
        run_id = run_manager.run_id if run_manager else config.get("run_id") or uuid7()
        shown = without_callbacks(patch_config(config, callbacks=child))
        # LangGraph leaves these runs out of its "messages" stream: the run "answer" shows points in order.
        call_options.config = {**shown, "tags": [*shown.get("tags", []), "nostream"]}
        call_options.message_id = f"lc_run--{run_id}"
        return Answer(self.options, call_options, conversation), {**shown, "run_name": "answer"}


async def _shown_text(answer: Answer, config: RunnableConfig, name: str) -> AsyncGenerator[str, None]:
    """The text of ``answer`` in reading order, shown to handlers as what one chat model writes."""
    async with _shown_run(answer, config, name) as run, aclosing(answer.read()) as pieces:
        async for piece in pieces:
            if run:
                await run.wrote(piece)
            yield piece


def _shown_run(
    answer: Answer, config: RunnableConfig, name: str
) -> AbstractAsyncContextManager[ChatRun | None]:
    return chat_run(config, answer.conversation.messages, model=name, message_id=answer.message_id)


async def _just(value: LanguageModelInput) -> AsyncIterator[LanguageModelInput]:
    yield value
