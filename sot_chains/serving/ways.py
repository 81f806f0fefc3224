"""The ways in which a model answers a request: itself, point by point, as the router decides, or copying."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.runnables import Runnable

from sot_chains.calls.usage import Price, num_tokens, price_for
from sot_chains.chain import SkeletonOfThought
from sot_chains.providers import Provider, provider_of
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.router import auto_router
from sot_chains.router.rules import PLAINLY
from sot_chains.serving.loading import Copying
from sot_chains.serving.protocol import ChatRequest, RefusedError, tool_choice_of
from sot_chains.serving.text_bound import TextBound

Answers = Runnable[LanguageModelInput, AIMessage]
_FEWEST_TOKENS = 128  # an answer point by point with fewer would pay for points that it does not show


@dataclass(frozen=True)
class Way:
    """How one request is answered.

    Attributes:
        answers: Answers it.
        parameters: The parameters of the call.
        bound: Ends the text, where the calls are not told where.
        reason: Why it is answered so, if the router has decided.
    """

    answers: Answers
    parameters: dict[str, Any]
    bound: TextBound = field(default_factory=TextBound)
    reason: str | None = None


class ServedModel:
    """One model and its ways to answer.

    Args:
        model: What :class:`~sot_chains.SkeletonOfThought` takes.
        copying: What copying adds, if it is installed.
        prices: As :class:`~sot_chains.SkeletonOfThought`.
    """

    def __init__(
        self,
        model: str | Runnable[Any, Any] | Provider,
        *,
        copying: Copying | None = None,
        prices: Mapping[str, Price] | Price | None = None,
    ) -> None:
        self.provider = provider_of(model)
        self.copying = copying
        self.copy = copying.from_folder(model) if copying and copying.from_folder else None
        self.price = price_for(self.provider.model_name, prices)
        self.plain = SkeletonOfThought(self.provider, router=PLAINLY, loop_guard=False, prices=prices)
        self.guarded = SkeletonOfThought(self.provider, router=PLAINLY, prices=prices)
        self.sot = SkeletonOfThought(self.provider, router="always", prices=prices)

    @property
    def names(self) -> dict[str, str]:
        """The suffix of the model's name under which each way is asked for, and what it does."""
        names = {"": "the model itself", "sot": "point by point", "auto": "as the router decides"}
        return {**names, "copy": "from the folder"} if self.copy else names

    @property
    def chat_model(self) -> Runnable[Any, Any] | None:
        """The LangChain model, if it is a chat model, which takes more than text."""
        is_chat = isinstance(self.provider, LangChainProvider) and self.provider.takes_stop
        return cast("LangChainProvider", self.provider).runnable if is_chat else None

    async def way(self, suffix: str, request: ChatRequest, messages: list[BaseMessage]) -> Way:
        """How ``request`` is answered.

        Args:
            suffix: Of the name of the model; one of :attr:`names`.
            request: The request.
            messages: Its messages.

        Raises:
            RefusedError: It asks for what this way cannot do.
        """
        parameters = request.sampling() | self._references(request)
        if request.wants_form and suffix in ("sot", "copy"):
            field = "tools" if request.tools else "response_format"
            raise RefusedError(
                f"{field} needs an answer in one piece: ask for the model {self.provider.model_name!r} "
                f"itself, not for {self.provider.model_name}:{suffix}",
                param=field,
            )
        reason = None
        if suffix == "auto":
            suffix, reason = await self._routed(request, messages)
        if suffix == "sot" and request.bound is not None and request.bound < _FEWEST_TOKENS:
            suffix, reason = "", f"at most {request.bound} tokens are wanted, too few for several points"
        if suffix == "sot":
            bound = TextBound(request.stop, request.bound, count=num_tokens)
            return Way(self.sot, parameters, bound, reason)
        bounds: dict[str, Any] = {"stop": request.stop} if request.stop else {}
        if request.bound is not None:
            is_vendor = not isinstance(self.provider, LangChainProvider)
            renamed = is_vendor and request.max_completion_tokens is not None
            bounds["max_completion_tokens" if renamed else "max_tokens"] = request.bound
        if suffix == "copy":
            assert self.copy
            return Way(self.copy, parameters | bounds)
        plainly = self._plainly(request, parameters | bounds, reason)
        # Decided for the client: what the chain would write then, which ends where a small model goes round.
        return plainly if reason is None or request.wants_form else replace(plainly, answers=self.guarded)

    async def _routed(self, request: ChatRequest, messages: list[BaseMessage]) -> tuple[str, str]:
        if request.wants_form:
            return "", "JSON and calls of tools are written in one piece"
        route = await auto_router().ainvoke(messages)
        return "sot" if route.use_sot else "", f"{route.router} router: {route.reason}"

    def _plainly(self, request: ChatRequest, parameters: dict[str, Any], reason: str | None) -> Way:
        if request.response_format:
            parameters = {**parameters, "response_format": request.response_format}
        chat = self.chat_model
        if not request.tools or request.tool_choice == "none":
            return Way(chat or self.plain, parameters, reason=reason)
        if chat is None or not hasattr(chat, "bind_tools"):
            raise RefusedError(
                f"tools are not passed on to {self.provider.model_name!r}, which is served as text; leave "
                "tools out, or serve it as a LangChain chat model with --model python:PACKAGE.FUNCTION",
                param="tools",
            )
        choice = tool_choice_of(request.tool_choice)
        options: dict[str, Any] = {} if choice is None else {"tool_choice": choice}
        if request.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = request.parallel_tool_calls
        try:
            bound = chat.bind_tools(request.tools, **options)
        except (ValueError, NotImplementedError, TypeError) as error:
            said = str(error) or f"{type(chat).__name__} calls none"
            raise RefusedError(f"the model does not take these tools: {said}", param="tools") from error
        return Way(bound, parameters, reason=reason)

    def _references(self, request: ChatRequest) -> dict[str, Any]:
        if not request.references:
            return {}
        if self.copying is None:
            raise RefusedError("references are not served here", param="references")
        if self.copying.references is None:
            return {}
        return {"references": self.copying.references([one.text for one in request.references])}


class Answer:
    """The answer to one request, while it is written and afterwards.

    Args:
        way: How it is written.
        messages: The conversation.

    Attributes:
        text: Its text so far.
        usage: The tokens of all calls; ``None`` if nobody has reported any.
        metadata: ``response_metadata`` of the finished message.
        message: The finished message, with its calls of tools; ``None`` before.
    """

    def __init__(self, way: Way, messages: list[BaseMessage]) -> None:
        self._way = way
        self._messages = messages
        self.text = ""
        self.usage: UsageMetadata | None = None
        self.metadata: dict[str, Any] = {}
        self.message: AIMessage | None = None
        self.calls_tools = False

    @property
    def is_out_of_tokens(self) -> bool:
        """Whether its text was ended here because it had as many tokens as were wanted."""
        return self._way.bound.is_out_of_tokens

    async def read(self) -> AsyncGenerator[tuple[str, list[ToolCallChunk]], None]:
        """Writes it and yields what comes: text, or pieces of calls."""
        way = self._way
        chunks = cast(
            "AsyncGenerator[AIMessageChunk, None]", way.answers.astream(self._messages, **way.parameters)
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.usage_metadata:
                    self.usage = add_usage(self.usage, chunk.usage_metadata)
                if chunk.response_metadata:
                    self.metadata |= chunk.response_metadata
                calls = getattr(chunk, "tool_call_chunks", [])
                self.calls_tools |= bool(calls)
                # What comes after the end is read, too: the usage is in the last chunk.
                text = way.bound.feed(chunk.content if isinstance(chunk.content, str) else str(chunk.text))
                self.text += text
                if text or calls:
                    yield text, calls
        if rest := way.bound.end():
            self.text += rest
            yield rest, []

    async def write(self) -> None:
        """Writes it as a whole."""
        message = await self._way.answers.ainvoke(self._messages, **self._way.parameters)
        self.message, self.usage, self.metadata = message, message.usage_metadata, message.response_metadata
        self.text = self._way.bound.feed(str(message.text)) + self._way.bound.end()
        self.calls_tools = bool(message.tool_calls or message.invalid_tool_calls)

    @property
    def reason(self) -> str | None:
        """Why it was written this way, if that was decided for it."""
        trace = self.metadata.get("sot")
        return self._way.reason or (trace["route_reason"] if trace else None)
