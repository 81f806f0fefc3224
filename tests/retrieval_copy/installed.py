"""Documentation that comes with installed Python packages: files nobody here wrote."""

from __future__ import annotations

import sysconfig
from importlib.metadata import metadata
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
# Packages whose description, as their authors wrote it, is Markdown.
_DESCRIBED = (
    "anyio",
    "httpx",
    "openai",
    "pydantic",
    "pypdf",
    "qdrant-client",
    "rich",
    "tokenizers",
    "transformers",
)


def markdown_files(folder: Path) -> list[Path]:
    """The descriptions of installed packages, written into ``folder``."""
    written = []
    for package in _DESCRIBED:
        text = metadata(package).get_payload()
        if isinstance(text, str) and text.strip():
            path = folder / f"{package}.md"
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def html_files() -> list[Path]:
    """HTML pages that lie in installed packages."""
    return sorted(SITE_PACKAGES.rglob("*.html"))
