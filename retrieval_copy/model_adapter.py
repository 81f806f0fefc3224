"""Passes references to a model: to its engine, as OpenAI's predicted output, or not at all.

Knows the kinds of models. Does not know where references come from.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, convert_to_messages
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config

from sot_chains.aio.blocking import BlockingRunnable
from sot_chains.providers import Delta, Provider
from sot_chains.providers.base import LocalChatModel
from sot_chains.providers.langchain import LangChainProvider

if TYPE_CHECKING:
    from local_backend import ChatLocal

Transport = Literal["references", "prediction"]

RETRIEVE = "retrieve"
"""A keyword argument of the chain that is not passed to the model."""

# The models named in OpenAI's guide to predicted outputs, and their dated versions.
_PREDICTED_OUTPUTS = re.compile(r"gpt-4(o|o-mini|\.1|\.1-mini|\.1-nano)(-\d{4}-\d{2}-\d{2})?")
# Predicted tokens that the answer does not contain are billed like output tokens.
_MAX_PREDICTION_CHARACTERS = 8_000
# For models whose tokenizer is not available. A token has about four characters, so 3 overestimates.
_CHARACTERS_PER_TOKEN = 3
_BOUNDS = frozenset({"max_tokens", "max_new_tokens", "max_completion_tokens"})


def find_transport(model: Runnable[Any, Any], prediction: bool | None = None) -> Transport | None:
    """How ``model``, possibly wrapped, takes references; ``None`` if it takes none.

    ``prediction`` says whether it takes OpenAI's; by default only models given as ``"openai:..."`` that are
    known to.
    """
    provider = _provider(model)
    if provider.local:
        return "references"
    if prediction is None:
        prediction = all(
            isinstance(one, ProviderModel) and _PREDICTED_OUTPUTS.fullmatch(one.model_name)
            for one in provider.models
        )
    return "prediction" if prediction else None


def arguments(transport: Transport | None, texts: Sequence[str]) -> dict[str, Any]:
    """The arguments of a model call that let the model copy from ``texts``."""
    if not texts or transport is None:
        return {}
    if transport == "references":
        from local_backend import References

        return {"references": References(texts)}
    predicted = "\n\n".join(texts)[:_MAX_PREDICTION_CHARACTERS]
    return {"prediction": {"type": "content", "content": predicted}}


def limits(model: Runnable[Any, Any], bounds: Mapping[str, Any]) -> dict[str, Any]:
    """``bounds`` of the answers of a local model, as far as the user has not bound them.

    Other models know when to stop, and may take reasoning for a part of the answer.
    """
    if find_transport(model, prediction=False) != "references":
        return {}
    provider = _provider(model)
    given = set(provider.bound).union(*(cast("ChatLocal", one).model_fields_set for one in provider.models))
    names = bounds.keys() - given - (_BOUNDS if given & _BOUNDS else set())
    return {name: bounds[name] for name in bounds if name in names}


def takes_quotes(model: Runnable[Any, Any], wanted: bool | None, *, has_own_prompt: bool) -> bool:
    """Whether a grammar is to bound the answers of ``model`` to quotations.

    By default it does for a local model, not a method around one, that is asked by the default prompt.

    Raises:
        ValueError: It is wanted, but the model cannot be bound.
    """
    provider = LangChainProvider(model)
    models = cast("Sequence[ChatLocal]", provider.models)
    can_be_bound = provider.local is not None and all(one.engine.tokenizer.is_fast for one in models)
    if wanted and not can_be_bound:
        raise ValueError("quotes=True needs a ChatLocal whose tokenizer is a fast one; leave quotes out")
    return can_be_bound and not has_own_prompt if wanted is None else wanted


def joined(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the user's call arguments with ``ours``; the user's win, and their references come first."""
    theirs = {name: value for name, value in given.items() if name != RETRIEVE}
    if theirs.keys() & {"tools", "response_format"}:
        ours = {name: value for name, value in ours.items() if name != "grammar"}
    if theirs.keys() & _BOUNDS:
        ours = {name: value for name, value in ours.items() if name not in _BOUNDS}
    if theirs.get("references") is not None and "references" in ours:
        from local_backend import References

        both = (*References.of(theirs["references"]).texts, *ours["references"].texts)
        return {**theirs, "references": References(both)}
    return {**ours, **theirs}


def max_input_tokens(model: Runnable[Any, Any]) -> int | None:
    """Maximum input tokens of ``model`` from its LangChain profile, if known."""
    profiles = [one.profile or {} for one in _provider(model).models if isinstance(one, BaseChatModel)]
    limits = [profile.get("max_input_tokens") for profile in profiles]
    return min((limit for limit in limits if limit), default=None)


def token_counter(model: Runnable[Any, Any]) -> Callable[[str], int]:
    """Returns a token counter: exact for a single local model, otherwise an estimate that is rather high."""
    (first, *others) = _provider(model).models
    if not others and isinstance(first, LocalChatModel):
        return partial(_num_tokens, first)
    return _estimated_num_tokens  # a function of this module, so that a chain can be pickled


def _num_tokens(model: Any, text: str) -> int:
    return len(model.get_token_ids(text))


def _estimated_num_tokens(text: str) -> int:
    return -(-len(text.encode(errors="replace")) // _CHARACTERS_PER_TOKEN)


def continues_replies(model: Runnable[Any, Any]) -> bool:
    """Whether ``model`` declares support for assistant prefill."""
    return _provider(model).supports_prefill


def _provider(model: Any) -> LangChainProvider:
    """What looks through wrappers; also those of a method that answers with a model, as SkeletonOfThought."""
    inner = getattr(model, "provider", None)
    return inner if isinstance(inner, LangChainProvider) else LangChainProvider(model)


class ProviderModel(BlockingRunnable[LanguageModelInput, AIMessage]):
    """Wraps a provider as a Runnable that returns messages."""

    def __init__(self, provider: Provider) -> None:
        self.completions = provider

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self.completions.model_name

    @property
    def supports_assistant_prefill(self) -> bool:
        """Whether the model continues a final assistant message instead of answering it."""
        return self.completions.supports_prefill

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """Streams the completion."""
        messages = convert_to_messages([HumanMessage(input)] if isinstance(input, str) else input)
        deltas = self.completions.stream(messages, config=ensure_config(config), **kwargs)
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            async for delta in deltas:
                metadata = dict(delta.response_metadata or {})
                if delta.finish_reason:
                    metadata["finish_reason"] = delta.finish_reason
                told: Any = {"usage_metadata": delta.usage, "response_metadata": metadata}
                yield AIMessageChunk(content=delta.text, **told)

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Returns the whole completion."""
        whole = AIMessageChunk(content="")
        async for chunk in self.astream(input, config, **kwargs):
            whole = whole + chunk
        return cast("AIMessage", message_chunk_to_message(whole))
