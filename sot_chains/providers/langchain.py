"""Completions from LangChain: any chat model, or any Runnable from messages to a message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from traceback import clear_frames
from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence, RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable

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

    @property
    def supports_prefill(self) -> bool:
        """Whether every wrapped model has the attribute ``supports_assistant_prefill`` set to ``True``."""
        for model in self.models:
            if not (isinstance(model, ContinuesReplies) and model.supports_assistant_prefill is True):
                return False
        return True

    @cached_property
    def local(self) -> LocalChatModel | None:
        """The wrapped model, if every one of them is local; the first where there are fallbacks."""
        local = [model for model in self.models if isinstance(model, LocalChatModel)]
        return local[0] if len(local) == len(self.models) else None

    @property
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
    return next((str(metadata[name]) for name in _REASONS if metadata.get(name)), missing)


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
