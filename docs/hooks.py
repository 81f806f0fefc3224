"""What the site needs beyond its pages: the repository's files that they link to, and notebooks as pages.

Pages link to files of the repository by relative paths, so that the links work wherever the repository is
read. The site has no address of the repository, so it takes such files along, under ``repository/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data|obj):`~?([^`]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the notebooks as pages, and the files of the repository that pages link to."""
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        content = _as_markdown(json.loads(notebook.read_text("utf-8")))
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=content))
    for page in list(files.documentation_pages()):
        for link in _LINK.findall(page.content_string):
            target = _find_target(page.src_uri, link)
            if target and target.is_file() and target.suffix != ".ipynb":
                uri = f"repository/{target.relative_to(ROOT).as_posix()}"
                if not files.get_file_from_path(uri):
                    files.append(File.generated(config, uri, content=target.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links to their copies on the site."""
    here = PurePosixPath(page.file.src_uri)
    up = "../" * (len(here.parts) - 1)

    def moved(link: re.Match[str]) -> str:
        target = _find_target(page.file.src_uri, link[1])
        if target is None:
            return link[1]
        name = target.relative_to(ROOT)
        if name.suffix == ".ipynb":
            return f"{up}{name.with_suffix('.md').as_posix()}"
        return f"{up}repository/{name.as_posix()}"

    return _LINK.sub(moved, markdown)


def _find_target(page: str, link: str) -> Path | None:
    """The file of the repository outside ``docs`` that a page's link names."""
    folder = (ROOT / "docs" / page).parent
    target = (folder / link).resolve()
    is_outside = target.is_relative_to(ROOT) and not target.is_relative_to(ROOT / "docs")
    return target if is_outside and target.exists() else None


def _as_markdown(notebook: Mapping[str, Any]) -> str:
    return "\n\n".join(block for cell in notebook["cells"] for block in _blocks(cell))


def _blocks(cell: Mapping[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        # A notebook's page lies where its file would, were it among the pages.
        return [source.replace("](../", "](../../").replace("](../../docs/", "](../")]
    blocks = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if picture := data.get("image/png"):
            blocks.append(f'<img alt="output" src="data:image/png;base64,{"".join(picture).strip()}">')
        elif html := data.get("text/html"):
            blocks.append(f'<div class="output" markdown="0">{"".join(html)}</div>')
        elif written := data.get("text/markdown"):
            blocks.append(f'<div class="output" markdown>\n\n{"".join(written)}\n\n</div>')
        elif text := data.get("text/plain") or output.get("text"):
            blocks.append(f"```text\n{''.join(text).rstrip()}\n```")
    return blocks


class PlainRoles(Extension):
    """Turns the roles of Sphinx in docstrings into code."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for every object that is read."""
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
