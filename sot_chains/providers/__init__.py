"""What completions are sent to: LangChain models, or a vendor's SDK named by a string."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import Runnable

from sot_chains.providers.base import (
    DeadlineError,
    Delta,
    LocalChatModel,
    PrefillRefusedError,
    Provider,
    ProviderError,
)
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import VendorProvider, close_clients

__all__ = ["DeadlineError", "Delta", "LocalChatModel", "PrefillRefusedError", "Provider"]
__all__ += ["ProviderError", "VendorProvider", "close_clients", "make_provider"]


def make_provider(model: str | Runnable[Any, Any] | Provider, **options: Any) -> Provider:
    """The provider for ``model``.

    Args:
        model: ``"openai:MODEL"``, ``"anthropic:MODEL"``, a LangChain chat model or other Runnable that
            answers messages with a message, or a provider, which is returned as it is.
        **options: For a named model only: ``base_url``, ``api_key`` and the other arguments of its provider.

    Raises:
        ValueError: A name without a vendor, or with one that is not supported.
        TypeError: ``model`` is none of these, or options were given for a model that brings its own.
        ImportError: The extra of the model's vendor is not installed.
    """
    if isinstance(model, str):
        vendor, _, name = model.partition(":")
        try:
            if vendor == "openai":
                from sot_chains.providers.openai import OpenAIProvider

                return OpenAIProvider(name, **options)
            if vendor == "anthropic":
                from sot_chains.providers.anthropic import AnthropicProvider

                return AnthropicProvider(name, **options)
        except ModuleNotFoundError as error:
            message = f"{model!r} needs the extra {vendor}: pip install '.[{vendor}]' in a checkout"
            raise ImportError(message) from error
        raise ValueError(
            f'the model {model!r} is not supported by name; supported is "openai:MODEL", with base_url=... '
            'for compatible servers, and "anthropic:MODEL". Any other model can be given as a LangChain chat '
            "model"
        )
    if options:
        raise TypeError(
            f"the options {sorted(options)} go with a model named by a string; "
            f"configure {type(model).__name__} itself instead"
        )
    if isinstance(model, Runnable):
        return LangChainProvider(model)
    if isinstance(model, Provider):
        return model
    raise TypeError(
        'a model is "openai:MODEL", "anthropic:MODEL", a LangChain chat model or another Runnable, '
        f"got {type(model).__name__}"
    )
