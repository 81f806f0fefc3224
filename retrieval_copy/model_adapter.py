"""Passes references to a model: as engine references, as OpenAI's predicted output, or not at all.

Knows the kinds of models. Does not know where references come from.
"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, convert_to_messages
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config

from sot_chains.providers import Delta, Provider
from sot_chains.providers.blocking import BlockingRunnable

Way = Literal["references", "prediction"]

RETRIEVE = "retrieve"
"""A keyword argument of the chain that is not passed to the model."""

# The models named in OpenAI's guide to predicted outputs, and their dated versions.
_PREDICTED_OUTPUTS = re.compile(r"gpt-4(o|o-mini|\.1|\.1-mini|\.1-nano)(-\d{4}-\d{2}-\d{2})?")
# Predicted tokens that the answer does not contain are billed like output tokens.
_MAX_PREDICTION_CHARACTERS = 8_000
# For models whose tokenizer is not available. A token has about four characters, so 3 overestimates.
_CHARACTERS_PER_TOKEN = 3
_IDLE_DRAFTERS = frozenset({"Autoregressive", "Jacobi", "Lookahead"})
_ATTRIBUTES = ("bound", "default", "runnable", "provider")


def way_of(model: Runnable[Any, Any], prediction: bool | None = None) -> Way | None:
    """How ``model`` takes references; ``None`` if it takes none.

    Args:
        model: Possibly wrapped (``bind``, ``with_retry``, ``with_config``, ``SkeletonOfThought``).
        prediction: Whether it takes OpenAI's ``prediction``; by default only models given as
            ``"openai:..."`` that are known to take it.
    """
    models = list(_innermost(model))
    if all(map(_is_local, models)):
        return "references"
    if prediction is None:
        prediction = all(
            isinstance(one, ProviderModel) and _PREDICTED_OUTPUTS.fullmatch(one.model_name) for one in models
        )
    return "prediction" if prediction else None


def arguments(way: Way | None, texts: Sequence[str]) -> dict[str, Any]:
    """The arguments of a model call that let the model copy from ``texts``."""
    if not texts or way is None:
        return {}
    if way == "references":
        from local_backend import References

        return {"references": References(texts)}
    predicted = "\n\n".join(texts)[:_MAX_PREDICTION_CHARACTERS]
    return {"prediction": {"type": "content", "content": predicted}}


def joined(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the user's call arguments with ``ours``; the user's win, and their references come first."""
    theirs = {name: value for name, value in given.items() if name != RETRIEVE}
    if theirs.get("references") is not None and "references" in ours:
        from local_backend import References

        both = (*References.of(theirs["references"]).texts, *ours["references"].texts)
        return {**theirs, "references": References(both)}
    return {**ours, **theirs}


def idle_drafter(model: Runnable[Any, Any]) -> str | None:
    """Name of a drafter behind ``model`` that ignores references, if there is one."""
    names = [type(one.engine.drafter).__name__ for one in _innermost(model) if _is_local(one)]
    return next((name for name in names if name in _IDLE_DRAFTERS), None)


def max_input_tokens(model: Runnable[Any, Any]) -> int | None:
    """Maximum input tokens of ``model`` from its LangChain profile, if known."""
    limits = [_profile(one).get("max_input_tokens") for one in _innermost(model)]
    return min((limit for limit in limits if limit), default=None)


def token_counter(model: Runnable[Any, Any]) -> Callable[[str], int]:
    """Returns a token counter: exact for a single local model, otherwise an estimate that is rather high."""
    (first, *others) = _innermost(model)
    if not others and _is_local(first):
        return partial(_num_tokens, first)
    return _estimated_num_tokens  # a function of this module, so that a chain can be pickled


def _num_tokens(model: Any, text: str) -> int:
    return len(model.get_token_ids(text))


def _estimated_num_tokens(text: str) -> int:
    return -(-len(text.encode(errors="replace")) // _CHARACTERS_PER_TOKEN)


def continues_replies(model: Runnable[Any, Any]) -> bool:
    """Whether ``model`` declares support for assistant prefill."""
    return all(getattr(one, "supports_assistant_prefill", False) is True for one in _innermost(model))


def _innermost(model: Any) -> Iterator[Any]:
    """The models behind wrappers; several if there are fallbacks or alternatives."""
    for attribute in _ATTRIBUTES:
        inner = getattr(model, attribute, None)
        if isinstance(inner, Runnable) or hasattr(inner, "runnable"):
            yield from _innermost(inner)
            alternatives = dict(getattr(model, "alternatives", {})).values()
            for alternative in (*getattr(model, "fallbacks", ()), *alternatives):
                yield from _innermost(alternative)
            return
    yield model


def _is_local(model: object) -> bool:
    if "local_backend.integrations.chat_local" not in sys.modules:  # then none exists; avoids importing torch
        return False
    from local_backend import ChatLocal

    return isinstance(model, ChatLocal)


def _profile(model: Any) -> dict[str, Any]:
    profile = getattr(model, "profile", None)
    return dict(profile) if isinstance(profile, dict) else {}


class ProviderModel(BlockingRunnable[LanguageModelInput, AIMessage]):
    """Wraps a provider as a Runnable that returns messages.

    Args:
        provider: Streams completions.
    """

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
                yield AIMessageChunk(
                    content=delta.text, usage_metadata=delta.usage, response_metadata=metadata
                )

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Returns the whole completion."""
        whole = AIMessageChunk(content="")
        async for chunk in self.astream(input, config, **kwargs):
            whole = whole + chunk
        return cast("AIMessage", message_chunk_to_message(whole))
