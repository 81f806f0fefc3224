"""The models that the commands of ``sot`` take by name, and what other packages add to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
_EXPECTED = "Names of other models: local:NAME, openai:NAME, anthropic:NAME"


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
    # What models run on here, given what to look for, and whether torch is to be loaded.
    examine_machine: Callable[[Mapping[str, Any], bool], Mapping[str, Any]] = lambda known, loads_torch: {}
    # Raises, before anything is loaded, if there is no model at a path or of a name.
    find_local: Callable[[str], object] = lambda path: None


def find_vendor(name: str | None) -> str | None:
    """The vendor in a model's name; ``None`` if it is to run here."""
    vendor, separator, _ = (name or LOCAL).partition(":")
    return None if not separator or f"{vendor}:" in (LOCAL, PYTHON) else vendor


def find_model(
    name: str | None,
    extras: Extras,
    opened: ExitStack,
    base_url: str | None = None,
    key_name: str | None = None,
    *,
    needs_key: bool = True,
) -> Callable[..., Any]:
    """Checks the model that ``--model`` names, by default the local one; what is returned loads it."""
    name, function, path = name or LOCAL, None, None
    if vendor := find_vendor(name):
        from sot_chains.providers import make_provider

        key = os.environ.get(key_name) if key_name else None
        if key_name and not key:
            raise ValueError(f"the environment variable {key_name} named by --api-key-env is not set")
        provider: Any = make_provider(name, base_url=base_url, api_key=key)
        if needs_key and provider.find_key() is None:
            how = f"set {vendor.upper()}_API_KEY, or name another variable by --api-key-env"
            raise ValueError(f"there is no key for {name}: {how}; for a server of your own give --base-url")
        return lambda: provider
    if base_url and name == LOCAL:
        raise ValueError(f"--base-url {base_url} needs the name of a model there: --model openai:NAME")
    if name.startswith(PYTHON):
        try:
            function = resolve_name(name.removeprefix(PYTHON))
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{name}: {error}; expected python:PACKAGE.FUNCTION") from error
    elif name.removeprefix(LOCAL) not in ("", "default"):
        path = os.path.expanduser(name.removeprefix(LOCAL))
        try:
            extras.find_local(path)
        except (ImportError, OSError, ValueError) as error:
            raise type(error)(f"{error}. {_EXPECTED}") from error

    def load(**options: Any) -> Any:
        try:
            model = function() if function else extras.load_local(path, **options)
        except ImportError as error:
            raise ImportError(f"{error}. {_EXPECTED}") from error
        if hasattr(model, "close"):
            opened.callback(model.close)
        return model

    return load
