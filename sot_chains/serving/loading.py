"""The models that the commands of ``sot`` take by name, and what other packages add to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage
    from langchain_core.runnables import Runnable

PYTHON, LOCAL = "python:", "local:"
_EXPECTED = "Expected a folder, a GGUF file, local:NAME for one on the hub, openai:NAME, anthropic:NAME"


@dataclass(frozen=True)
class Copying:
    """What copying adds to a model. Another package does the work."""

    cite: Callable[[str, Sequence[Document]], Sequence[Mapping[str, Any]]]  # the citations in a text
    # Makes a model answer from a folder, with citations; None without a folder.
    from_folder: Callable[[Any], Runnable[LanguageModelInput, AIMessage]] | None = None
    # Makes the argument "references" of a call; None if the model takes none, which changes no answer.
    references: Callable[[Sequence[str]], Any] | None = None


@dataclass(frozen=True)
class Extras:
    """What the packages beside this one add to the commands."""

    # Loads the model at a path (None: the default one) with the options of ChatLocal.from_pretrained.
    load_local: Callable[..., Any]
    make_copying: Callable[[Any, Path | None], Copying]  # for a model, with a folder of documents or None


def find_vendor(name: str | None) -> str | None:
    """The vendor in a model's name; ``None`` if it is to run here."""
    vendor, separator, _ = (name or LOCAL).partition(":")
    return None if not separator or f"{vendor}:" in (LOCAL, PYTHON) else vendor


def load_model(
    name: str | None,
    extras: Extras,
    opened: ExitStack,
    base_url: str | None = None,
    key_name: str | None = None,
    **options: Any,
) -> Any:
    """Loads the model that ``--model`` names, by default the local default model."""
    from sot_chains.providers import make_provider

    name = name or LOCAL
    if find_vendor(name) is None:
        if name.startswith(PYTHON):
            try:
                function = resolve_name(name.removeprefix(PYTHON))
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"{name}: {error}; expected python:PACKAGE.FUNCTION") from error
            model = function()
        else:
            path = os.path.expanduser(name.removeprefix(LOCAL))
            if path not in ("", "default") and not os.path.exists(path):
                with suppress(ImportError):  # what loads the model says which extra is missing
                    from sot_chains.router.encoder import is_cached

                    is_cached(path, "config.json", advice=_EXPECTED)
            model = extras.load_local(None if path in ("", "default") else path, **options)
        if hasattr(model, "close"):
            opened.callback(model.close)
        return model
    key = os.environ.get(key_name) if key_name else None
    if key_name and not key:
        raise ValueError(f"the environment variable {key_name} named by --api-key-env is not set")
    return make_provider(name, base_url=base_url, api_key=key)
