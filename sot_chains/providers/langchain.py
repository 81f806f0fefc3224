"""LangChain's chat models on both sides: completions from any (or any Runnable), and chains as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from traceback import clear_frames
from typing import Any, cast

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManager
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence, RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable
from pydantic import Field

from sot_chains.aio.blocking import BlockingRunnable, iterate
from sot_chains.providers.base import ContinuesReplies, Delta, LocalChatModel, WrapsModel, with_results

_REASONS = ("finish_reason", "stop_reason", "done_reason", "stopReason")  # the last of Amazon's Converse


class LangChainProvider:
    """Streams completions from a Runnable."""

    def __init__(self, runnable: Runnable[Any, Any]) -> None:
        self.runnable = runnable

    @cached_property
    def models(self) -> tuple[object, ...]:
        """The wrapped models: several if there are fallbacks."""
        return tuple(_innermost(self.runnable))

    @cached_property
    def supports_prefill(self) -> bool:
        """Whether every wrapped model has the attribute ``supports_assistant_prefill`` set to ``True``."""
        said = (isinstance(one, ContinuesReplies) and one.supports_assistant_prefill for one in self.models)
        return all(one is True for one in said)

    @cached_property
    def local(self) -> LocalChatModel | None:
        """The wrapped model, if every one of them is local; the first where there are fallbacks."""
        local = [model for model in self.models if isinstance(model, LocalChatModel)]
        return local[0] if len(local) == len(self.models) else None

    @cached_property
    def model_name(self) -> str:
        """The name of the wrapped model, or else of its class."""
        model = self.models[0]
        names = (getattr(model, "model_name", None), getattr(model, "model", None))
        return next((name for name in names if isinstance(name, str) and name), type(model).__name__)

    @cached_property
    def takes_stop(self) -> bool:
        """Whether every model inside is a chat model, which takes stop strings; a function may not."""
        return all(isinstance(model, BaseChatModel) for model in self.models)

    @cached_property
    def bound(self) -> dict[str, Any]:
        """The call parameters that wrappers such as ``bind`` set."""
        parameters: dict[str, Any] = {}
        wrapper: object = self.runnable
        while isinstance(wrapper, RunnableBindingBase):
            parameters = {**wrapper.kwargs, **parameters}
            wrapper = wrapper.bound
        return parameters

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The call parameters of calls that do not set them: of a local model, and what wrappers set."""
        names = ("stop", "max_tokens", "min_tokens", "presence_penalty") if self.local else ()
        return {name: getattr(self.local, name) for name in names} | self.bound

    async def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncGenerator[Delta, None]:
        """Yields the Runnable's answer to ``messages`` as it arrives."""
        num_choices = kwargs.get("n") or self.bound.get("n") or getattr(self.models[0], "n", None)
        if isinstance(num_choices, int) and num_choices > 1:
            raise ValueError(
                f"n={num_choices} asks for several choices, which LangChain's streams mix; an answer is one "
                "text: omit n"
            )
        usage: UsageMetadata | None = None
        metadata: dict[str, Any] = {}
        answer = self.runnable.astream(with_results(messages), config, **kwargs)
        try:
            async with aclosing(cast("AsyncGenerator[Any, None]", answer)) as chunks:
                async for chunk in chunks:
                    delta = self._delta(chunk)
                    usage, delta.usage = _with_usage(usage, delta.usage), None
                    if isinstance(chunk, AIMessageChunk):
                        metadata |= chunk.response_metadata
                    yield delta
        except Exception as error:  # holds the streams below, which are to end in this event loop
            clear_frames(error.__traceback__)
            raise
        yield Delta(usage=usage, finish_reason=find_finish_reason(metadata, is_streamed=True))

    def _delta(self, chunk: object) -> Delta:
        if isinstance(chunk, AIMessage):  # AIMessageChunk is one
            metadata = chunk.response_metadata
            return Delta(
                # Fast path for plain text: searching content blocks for text is slow.
                text=chunk.content if isinstance(chunk.content, str) else str(chunk.text),
                usage=chunk.usage_metadata,
                finish_reason=find_finish_reason(metadata) if metadata else None,
                response_metadata=metadata or None,
                reasoning=_find_reasoning(chunk),
            )
        if isinstance(chunk, str):
            return Delta(text=chunk)
        raise TypeError(
            f"the model given to SkeletonOfThought must answer with an AIMessage or text, but "
            f"{self.runnable.get_name()} answered with {type(chunk).__name__}: {chunk!r:.80}; "
            "move parsers and tools that follow the model to after SkeletonOfThought"
        )


def _with_usage(so_far: UsageMetadata | None, reported: UsageMetadata | None) -> UsageMetadata | None:
    """The tokens of a call after another report of them, which by LangChain's convention is added."""
    if reported is None or not reported["total_tokens"] or so_far is None:
        return so_far or (reported if reported and reported["total_tokens"] else None)
    if reported["input_tokens"] and reported["input_tokens"] >= so_far["input_tokens"] > 0:
        return max(so_far, reported, key=lambda usage: usage["total_tokens"])
    return add_usage(so_far, reported)


def find_finish_reason(metadata: Mapping[str, Any], *, is_streamed: bool = False) -> str | None:
    """Why a reply ended, by the ``response_metadata`` of LangChain's models."""
    details = metadata.get("incomplete_details") or {}
    if details or metadata.get("object") == "response":  # of OpenAI's newer API
        metadata = {"finish_reason": details.get("reason") or metadata.get("status"), **metadata}
    missing = "no finish reason" if is_streamed and "model_provider" in metadata else None
    return str(found) if (found := next(filter(None, map(metadata.get, _REASONS)), missing)) else None


def _find_reasoning(message: AIMessage) -> str:
    if isinstance(message.content, str):
        reported = message.additional_kwargs.get("reasoning_content")
        return reported if isinstance(reported, str) else ""
    blocks = (block for block in message.content_blocks if block["type"] == "reasoning")
    return "".join(str(block.get("reasoning") or "") for block in blocks)


def _innermost(runnable: object) -> Iterator[object]:
    inner: Sequence[object] = ()
    match runnable:
        case RunnableBindingBase():  # bind, with_config, with_retry
            inner = (runnable.bound,)
        case RunnableWithFallbacks():
            inner = (runnable.runnable, *runnable.fallbacks)
        case RunnableSequence():
            inner = (runnable.first,)
        case DynamicRunnable():  # configurable_fields
            inner = (runnable.default,)
        case WrapsModel(model=Runnable() as model):
            inner = (model,)
    for one in inner:
        yield from _innermost(one)
    if not inner:
        yield runnable


class ChainChatModel(BaseChatModel):
    """A chain as a ``BaseChatModel``, for what takes nothing else.

    LangGraph's stream of messages shows this model's run and none below it; tracers see all of them.

    Attributes:
        chain: Answers messages with a message.
        model_name: The name in metadata. Not the inner model's, or its tokens would be counted twice.
    """

    chain: Any
    model_name: str
    cache: BaseCache | bool | None = Field(default=False, exclude=True)  # by name, two chains would be one

    @property
    def _llm_type(self) -> str:
        return "chain"

    def _named(self, message: AIMessage) -> Any:
        if message.response_metadata.get("model_name"):
            message.response_metadata = {**message.response_metadata, "model_name": self.model_name}
        return message

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        kwargs |= {"stop": stop} if stop else {}
        async with aclosing(self.chain.astream(messages, inner_config(run_manager), **kwargs)) as chunks:
            async for chunk in chunks:
                yield ChatGenerationChunk(message=self._named(chunk))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        work: Any = partial(self._astream, messages, stop, run_manager, **kwargs)
        yield from iterate(work)

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))


def inner_config(run_manager: Any) -> RunnableConfig:
    """The config of runs below that of a chat model; LangGraph's streams leave out those with this tag."""
    config = RunnableConfig(tags=["nostream"])
    if run_manager is not None:  # else they stand below the run that the chat model was called in
        config["callbacks"] = child = AsyncCallbackManager([], parent_run_id=run_manager.run_id)
        child.set_handlers(run_manager.inheritable_handlers)
        child.add_metadata(run_manager.inheritable_metadata)
    return config


class ChatRunnable(BlockingRunnable[LanguageModelInput, AIMessage]):
    """A Runnable that takes what a chat model takes and returns what one returns."""

    def as_chat_model(self) -> ChainChatModel:
        """This chain as a ``BaseChatModel``, for what takes nothing else."""
        return ChainChatModel(chain=self, model_name=self.get_name())

    def stream_events(
        self, input: Any, config: RunnableConfig | None = None, *, version: str = "v3", **kwargs: Any
    ) -> Any:
        """The answer as a ``ChatModelStream`` of content blocks, as ``version="v3"`` of a chat model."""
        model: Any = self.as_chat_model()
        return model.stream_events(input, config, version=version, **kwargs)

    def astream_events(
        self, input: Any, config: RunnableConfig | None = None, *, version: str = "v2", **kwargs: Any
    ) -> Any:
        """The events of all runs; with ``version="v3"`` an awaitable ``AsyncChatModelStream``."""
        source: Any = self.as_chat_model() if version == "v3" else super()
        return source.astream_events(input, config, version=version, **kwargs)
