"""The modes in which a model answers: itself, by Skeleton-of-Thought, as the router decides, or copying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable

from sot_chains.calls.usage import Price, num_tokens, price_for
from sot_chains.chain import SkeletonOfThought
from sot_chains.prompts.profile import UNFILTERED, ModelProfile
from sot_chains.providers import Provider, VendorProvider, make_provider
from sot_chains.providers.base import with_results
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.router import auto_router
from sot_chains.serving.answer import Answer, Answers, TextLimit
from sot_chains.serving.loading import Copying
from sot_chains.serving.schema import ChatRequest, RefusedError

_NOT_ANTHROPIC = {"presence_penalty", "frequency_penalty", "logit_bias", "response_format", "prediction"}
_MIN_TOKENS = 128  # with fewer, an answer by points would pay for points that it does not show


class ServedModel:
    """One model and its modes; the arguments are those of :class:`~sot_chains.SkeletonOfThought`."""

    def __init__(
        self,
        model: str | Runnable[Any, Any] | Provider,
        *,
        copying: Copying | None = None,
        prices: Mapping[str, Price] | Price | None = None,
        profile: ModelProfile | Literal["small", "strong"] | None = None,
    ) -> None:
        self.provider = make_provider(model)
        self.price = price_for(self.provider.model_name, prices)
        self.plain = SkeletonOfThought(self.provider, router="never", profile=UNFILTERED, prices=prices)
        self.sot = SkeletonOfThought(self.provider, router="always", profile=profile, prices=prices)
        self.auto = SkeletonOfThought(self.provider, router="unless_busy", profile=profile, prices=prices)
        self.copy = copying.from_folder(model) if copying and copying.from_folder else None
        self.guarded = SkeletonOfThought(self.provider, router="never", profile=profile, prices=prices)
        self._copying = copying
        if isinstance(self.provider, LangChainProvider) and self.provider.local:
            self.provider.local.splitting_gain(2, 0, 2, 1)  # measures forwards now, while none runs
        # A LangChain chat model takes more than text.
        is_chat_model = isinstance(self.provider, LangChainProvider) and self.provider.takes_stop
        self._chat_model = cast("LangChainProvider", self.provider).runnable if is_chat_model else None

    @property
    def modes(self) -> dict[str, str]:
        """The suffix of the model's name that asks for a mode, and what it does."""
        modes = {"": "the model itself", "sot": "Skeleton-of-Thought", "auto": "as the router decides"}
        return {**modes, "copy": "from the folder"} if self.copy else modes

    async def answer(self, suffix: str, request: ChatRequest) -> Answer:
        """The answer to ``request`` in the mode that ``suffix`` asks for, not yet written."""
        messages, name = with_results(request.langchain_messages()), self.provider.model_name
        parameters = self._sampling(request)
        options: dict[str, Any] = {}
        parameters |= self._sources(request, options)
        if request.is_in_one_piece and suffix in ("sot", "copy"):
            field = "tools" if request.callable_tools else "response_format"
            message = f"{field} needs an answer in one piece; use the model {name}, not {name}:{suffix}"
            raise RefusedError(message, param=field)
        if suffix == "auto":
            suffix, options["reason"] = await _route(request, messages)
        limit = request.token_limit
        if suffix == "sot" and limit is not None and limit < _MIN_TOKENS:
            suffix, options["reason"] = "", f"a limit of {limit} tokens is too low for several points"
        if suffix == "sot":
            text_limit = TextLimit(request.stops, limit, count=num_tokens)
            chain = self.auto if "reason" in options else self.sot
            return Answer(chain, messages, parameters, limit=text_limit, **options)
        parameters |= self._limits(request)
        if suffix == "copy":
            assert self.copy
            return Answer(self.copy, messages, parameters, **options)
        if request.form:
            parameters["response_format"] = request.form
        if request.callable_tools:
            answers = self._with_tools(request)
            options["may_call"] = True
        elif "reason" in options and not request.is_in_one_piece:  # repetition ends the text, as in the chain
            answers = self.guarded
        else:
            answers = self._chat_model or self.plain
        return Answer(answers, messages, parameters, **options)

    def _sampling(self, request: ChatRequest) -> dict[str, Any]:
        parameters = request.sampling()
        if isinstance(self.provider, VendorProvider) and self.provider.vendor == "anthropic":
            asked = {*parameters, "response_format" if request.form else ""}
            if missing := sorted(_NOT_ANTHROPIC & asked):
                message = f"{missing[0]} is not supported by {self.provider.model_name!r}; omit it"
                raise RefusedError(message, param=missing[0])
        return parameters

    def _limits(self, request: ChatRequest) -> dict[str, Any]:
        limits: dict[str, Any] = {"stop": request.stops} if request.stops else {}
        if request.token_limit is not None:
            is_vendor = not isinstance(self.provider, LangChainProvider)
            is_renamed = is_vendor and request.max_completion_tokens is not None
            limits["max_completion_tokens" if is_renamed else "max_tokens"] = request.token_limit
        return limits

    def _with_tools(self, request: ChatRequest) -> Answers:
        chat_model, choice = self._chat_model, request.langchain_tool_choice()
        if chat_model is None or not hasattr(chat_model, "bind_tools"):
            raise RefusedError(
                f"tools are not supported by {self.provider.model_name!r}, which is served as text; omit "
                "tools, or serve it as a LangChain chat model with --model python:PACKAGE.FUNCTION",
                param="tools",
            )
        given = {"tool_choice": choice, "parallel_tool_calls": request.parallel_tool_calls}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        try:
            return cast("Answers", chat_model.bind_tools(request.callable_tools, **options))
        except (ValueError, NotImplementedError, TypeError) as error:
            reason = str(error) or f"{type(chat_model).__name__} does not support tools"
            raise RefusedError(f"the model refuses these tools: {reason}", param="tools") from error

    def _sources(self, request: ChatRequest, options: dict[str, Any]) -> dict[str, Any]:
        """The parameters of calls for what the answer may copy, which it also cites."""
        copying, given = self._copying, (*request.references, *request.documents)
        if copying is None and request.references:
            raise RefusedError("references are not supported by this server", param="references")
        if copying and (documents := [one.document for one in given]):
            options["cite"] = lambda text: copying.cite(text, documents)
        shown = [one.model_dump(exclude_none=True) for one in request.documents]
        parameters: dict[str, Any] = {"documents": shown} if shown else {}
        if copying and copying.references and request.references:
            parameters["references"] = copying.references([one.text for one in request.references])
        return parameters


async def _route(request: ChatRequest, messages: list[BaseMessage]) -> tuple[str, str]:
    if request.is_in_one_piece:
        return "", "JSON and tool calls are written in one piece"
    try:
        route = await auto_router().ainvoke(messages)
    except ValueError as error:  # an image or a system message alone
        return "", str(error)
    return "sot" if route.use_sot else "", f"{route.router} router: {route.reason}"
