"""The modes in which a model answers: itself, by Skeleton-of-Thought, as the router decides, or copying."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.runnables import Runnable

from sot_chains.calls.usage import Price, num_tokens, price_for
from sot_chains.chain import SkeletonOfThought
from sot_chains.prompts.profile import UNFILTERED
from sot_chains.providers import Provider, provider_of
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.router import auto_router
from sot_chains.router.rules import PLAINLY
from sot_chains.serving.loading import Copying
from sot_chains.serving.schema import ChatRequest, RefusedError

Answers = Runnable[LanguageModelInput, AIMessage]
_MIN_TOKENS = 128  # with fewer, an answer by points would pay for points that it does not show


class TextLimit:
    """Ends a text before the first stop string, or after a number of tokens.

    A model that writes in one piece is told both. The calls of a skeleton are not: a stop string would end
    the outline, and a number of tokens would limit every point by itself.

    Args:
        stop: Strings before which the text ends; none of them is empty.
        max_tokens: Its most tokens; ``None`` for no limit.
        count: Counts the tokens of a text.

    Attributes:
        is_over: Whether the text has ended, so that all further text is dropped.
        is_out_of_tokens: Whether it has ended at the number of tokens.
    """

    def __init__(
        self, stop: Sequence[str] = (), max_tokens: int | None = None, *, count: Callable[[str], int] = len
    ) -> None:
        self._stop = tuple(stop)
        self._num_left = max_tokens
        self._count = count
        self._held = ""
        self.is_over = False
        self.is_out_of_tokens = False

    def feed(self, text: str) -> str:
        """The text to show now that ``text`` has arrived; the beginning of a stop string is held back."""
        if self.is_over:
            return ""
        whole = self._held + text
        if ends := [index for stop in self._stop if (index := whole.find(stop)) >= 0]:
            shown = self._counted(whole[: min(ends)])
            self.is_over, self._held = True, ""
            return shown
        num_held = max((_num_begun(whole, stop) for stop in self._stop), default=0)
        self._held = whole[len(whole) - num_held :]
        return self._counted(whole[: len(whole) - num_held])

    def end(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return "" if self.is_over else self._counted(held)

    def _counted(self, text: str) -> str:
        if self._num_left is None or not text:
            return text
        num_tokens = self._count(text)
        if num_tokens <= self._num_left:
            self._num_left -= num_tokens
            return text
        shown = text[: len(text) * self._num_left // num_tokens]
        self._num_left, self._held = 0, ""
        self.is_over = self.is_out_of_tokens = True
        return shown


def _num_begun(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` are the beginning of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Mode:
    """How one request is answered.

    Attributes:
        answers: Answers it.
        parameters: The parameters of the call.
        limit: Ends the text, if the calls are not told where.
        reason: Why it is answered this way, if that was decided for the client.
    """

    answers: Answers
    parameters: dict[str, Any]
    limit: TextLimit = field(default_factory=TextLimit)
    reason: str | None = None


class ServedModel:
    """One model and its modes.

    Args:
        model: What :class:`~sot_chains.SkeletonOfThought` takes.
        copying: What copying adds, if it is installed.
        prices: As for :class:`~sot_chains.SkeletonOfThought`.
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
        self.plain = SkeletonOfThought(self.provider, router=PLAINLY, profile=UNFILTERED, prices=prices)
        self.guarded = SkeletonOfThought(self.provider, router=PLAINLY, prices=prices)
        self.sot = SkeletonOfThought(self.provider, router="always", prices=prices)
        # A LangChain chat model takes more than text.
        is_chat_model = isinstance(self.provider, LangChainProvider) and self.provider.takes_stop
        self._chat_model = cast("LangChainProvider", self.provider).runnable if is_chat_model else None

    @property
    def modes(self) -> dict[str, str]:
        """The suffix of the model's name that asks for a mode, and what it does."""
        modes = {"": "the model itself", "sot": "Skeleton-of-Thought", "auto": "as the router decides"}
        return {**modes, "copy": "from the folder"} if self.copy else modes

    async def mode(self, suffix: str, request: ChatRequest, messages: list[BaseMessage]) -> Mode:
        """How ``request`` with ``messages`` is answered in the mode that ``suffix`` asks for.

        Raises:
            RefusedError: The mode does not support what it requests.
        """
        parameters = request.sampling() | self._references(request)
        name = self.provider.model_name
        if request.wants_form and suffix in ("sot", "copy"):
            field = "tools" if request.tools else "response_format"
            message = f"{field} needs an answer in one piece; use the model {name}, not {name}:{suffix}"
            raise RefusedError(message, param=field)
        reason, limit = None, request.token_limit
        if suffix == "auto":
            suffix, reason = await _route(request, messages)
        if suffix == "sot" and limit is not None and limit < _MIN_TOKENS:
            suffix, reason = "", f"a limit of {limit} tokens is too low for several points"
        if suffix == "sot":
            return Mode(self.sot, parameters, TextLimit(request.stop, limit, count=num_tokens), reason)
        if request.stop:
            parameters["stop"] = request.stop
        if limit is not None:
            is_renamed = self._is_vendor and request.max_completion_tokens is not None
            parameters["max_completion_tokens" if is_renamed else "max_tokens"] = limit
        if suffix == "copy":
            assert self.copy
            return Mode(self.copy, parameters)
        if request.response_format:
            parameters["response_format"] = request.response_format
        if request.tools and request.tool_choice != "none":
            return Mode(self._with_tools(request), parameters, reason=reason)
        # If the router has decided, repetition ends the text, as in the chain.
        is_guarded = reason is not None and not request.wants_form
        answers = self.guarded if is_guarded else self._chat_model or self.plain
        return Mode(answers, parameters, reason=reason)

    @property
    def _is_vendor(self) -> bool:
        return not isinstance(self.provider, LangChainProvider)

    def _with_tools(self, request: ChatRequest) -> Answers:
        chat_model, choice = self._chat_model, request.langchain_tool_choice()
        if chat_model is None or not hasattr(chat_model, "bind_tools"):
            raise RefusedError(
                f"tools are not supported by {self.provider.model_name!r}, which is served as text; omit "
                "tools, or serve it as a LangChain chat model with --model python:PACKAGE.FUNCTION",
                param="tools",
            )
        options: dict[str, Any] = {} if choice is None else {"tool_choice": choice}
        if request.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = request.parallel_tool_calls
        try:
            return cast("Answers", chat_model.bind_tools(request.tools, **options))
        except (ValueError, NotImplementedError, TypeError) as error:
            reason = str(error) or f"{type(chat_model).__name__} does not support tools"
            raise RefusedError(f"the model refuses these tools: {reason}", param="tools") from error

    def _references(self, request: ChatRequest) -> dict[str, Any]:
        if not request.references:
            return {}
        if self.copying is None:
            raise RefusedError("references are not supported by this server", param="references")
        if self.copying.references is None:
            return {}
        return {"references": self.copying.references([reference.text for reference in request.references])}


async def _route(request: ChatRequest, messages: list[BaseMessage]) -> tuple[str, str]:
    if request.wants_form:
        return "", "JSON and tool calls are written in one piece"
    route = await auto_router().ainvoke(messages)
    return "sot" if route.use_sot else "", f"{route.router} router: {route.reason}"


class Answer:
    """The answer to one request, while it is written and afterwards.

    Args:
        mode: How it is written.
        messages: The conversation.

    Attributes:
        text: Its text so far.
        usage: The tokens of all calls; ``None`` if nobody has reported any.
        metadata: ``response_metadata`` of the finished message.
        message: The finished message with its tool calls; ``None`` for a stream.
        calls_tools: Whether it calls tools.
    """

    def __init__(self, mode: Mode, messages: list[BaseMessage]) -> None:
        self._mode = mode
        self._messages = messages
        self.text = ""
        self.usage: UsageMetadata | None = None
        self.metadata: dict[str, Any] = {}
        self.message: AIMessage | None = None
        self.calls_tools = False

    @property
    def is_out_of_tokens(self) -> bool:
        """Whether its text was ended here at the number of tokens."""
        return self._mode.limit.is_out_of_tokens

    @property
    def reason(self) -> str | None:
        """Why it was written this way, if that was decided for the client."""
        trace = self.metadata.get("sot")
        return self._mode.reason or (trace["route_reason"] if trace else None)

    async def stream(self) -> AsyncGenerator[tuple[str, list[ToolCallChunk]], None]:
        """Writes it and yields text or pieces of tool calls as they arrive."""
        mode, limit = self._mode, self._mode.limit
        stream = mode.answers.astream(self._messages, **mode.parameters)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", stream)) as chunks:
            async for chunk in chunks:
                if chunk.usage_metadata:
                    self.usage = add_usage(self.usage, chunk.usage_metadata)
                if chunk.response_metadata:
                    self.metadata |= chunk.response_metadata
                calls = getattr(chunk, "tool_call_chunks", [])
                self.calls_tools |= bool(calls)
                # Chunks after the end of the text are read, too: the usage is in the last one.
                text = limit.feed(chunk.content if isinstance(chunk.content, str) else str(chunk.text))
                self.text += text
                if text or calls:
                    yield text, calls
        if rest := limit.end():
            self.text += rest
            yield rest, []

    async def write(self) -> None:
        """Writes it as a whole."""
        mode, limit = self._mode, self._mode.limit
        message = await mode.answers.ainvoke(self._messages, **mode.parameters)
        self.message, self.usage, self.metadata = message, message.usage_metadata, message.response_metadata
        self.text = limit.feed(str(message.text)) + limit.end()
        self.calls_tools = bool(message.tool_calls or message.invalid_tool_calls)
