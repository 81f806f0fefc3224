"""Loads text, Markdown, HTML and PDF files as LangChain documents with LangChain blob parsers.

Knows file formats. Does not know folders, indexes or splitting. Needs the ``rag`` extra for HTML and PDF.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.document_loaders import BaseBlobParser
from langchain_core.documents import Document
from langchain_core.documents.base import Blob

if TYPE_CHECKING:
    from bs4 import Tag

_NO_TEXT_TAGS = ("script", "style", "noscript", "template", "svg", "head")
_BLOCK_TAGS = frozenset(
    """
    address article aside blockquote br dd details div dl dt fieldset figcaption figure footer form h1 h2 h3
    h4 h5 h6 header hr li main nav ol p pre section summary table td th tr ul
    """.split()  # noqa: SIM905 - easier to read than a list of forty strings
)
_SPACES = re.compile(r"[^\S\n]*\n[^\S\n]*")
_BLANK_LINES = re.compile(r"\n{3,}")
_HEADING = re.compile(r"^#\s+(.+?)\s*#*\s*$|^(.+)\n=+\s*$", re.MULTILINE)
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")


class UnreadableFileError(ValueError):
    """A file has no readable text; the message says why."""


class TextParser(BaseBlobParser):
    """Parses plain text and Markdown in UTF-8 or UTF-16, with Windows-1252 as fallback."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with its first heading as ``title``.

        Raises:
            UnreadableFileError: The bytes are not text.
        """
        text = _decoded(blob.as_bytes())
        metadata = dict(blob.metadata)
        if heading := _HEADING.search(text[:2000]):
            metadata["title"] = (heading[1] or heading[2]).strip()
        yield Document(text, metadata=metadata)


class HtmlParser(BaseBlobParser):
    """Converts HTML to text, one line per block, without scripts and styles."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with the page's title as ``title``."""
        from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)  # the HTML parser reads XHTML well enough
            soup = BeautifulSoup(blob.as_bytes(), "html.parser")
        metadata = dict(blob.metadata)
        if soup.title and (title := soup.title.get_text(" ", strip=True)):
            metadata["title"] = " ".join(title.split())
        for tag in soup(_NO_TEXT_TAGS):
            tag.decompose()
        text = _SPACES.sub("\n", "".join(_html_text(soup)))
        yield Document(_BLANK_LINES.sub("\n\n", text).strip(), metadata=metadata)


class PdfParser(BaseBlobParser):
    """Parses PDF into one document per page."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text of each page that has text, with ``page`` counted from 1.

        Raises:
            UnreadableFileError: The file is broken or protected by a password.
        """
        from pypdf import PdfReader

        try:
            with blob.as_bytes_io() as stream:
                reader = PdfReader(stream)
                title = reader.metadata.title if reader.metadata else None
                titled = {**blob.metadata, **({"title": title} if title else {})}
                for number, page in enumerate(reader.pages, start=1):
                    if text := page.extract_text().strip():
                        yield Document(text, metadata={**titled, "page": number})
        except Exception as error:  # pypdf raises many types for broken files
            raise UnreadableFileError(f"not a readable PDF ({type(error).__name__}: {error})") from error


PARSERS: dict[str, BaseBlobParser] = {
    ".txt": TextParser(),
    ".text": TextParser(),
    ".md": TextParser(),
    ".markdown": TextParser(),
    ".rst": TextParser(),
    ".html": HtmlParser(),
    ".htm": HtmlParser(),
    ".xhtml": HtmlParser(),
    ".pdf": PdfParser(),
}
"""Parsers by file suffix, in lower case."""


def load_file(path: Path, *, source: str | None = None) -> list[Document]:
    """Loads a file as one document, or one per page.

    Args:
        path: The file.
        source: The ``source`` metadata of its documents; by default the path.

    Raises:
        UnreadableFileError: The file has no readable text or an unknown suffix.
    """
    parser = PARSERS.get(path.suffix.lower())
    if parser is None:
        raise UnreadableFileError(f"{path.suffix or 'no ending'} is none of {', '.join(PARSERS)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableFileError(error.strerror or str(error)) from error
    blob = Blob.from_data(content, path=str(path), metadata={"source": source or str(path)})
    documents = [document for document in parser.lazy_parse(blob) if document.page_content.strip()]
    if not documents:
        raise UnreadableFileError("it holds no text")
    return documents


def _decoded(content: bytes) -> str:
    utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    for encoding in ("utf-16",) if utf16 else ("utf-8-sig", "cp1252"):
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        if not _CONTROL.search(text):
            return text.replace("\r\n", "\n")
    raise UnreadableFileError("the bytes are not text")


def _html_text(tag: Tag) -> Iterator[str]:
    from bs4.element import NavigableString, PreformattedString, Tag

    for child in tag.children:
        if isinstance(child, Tag):
            is_block = child.name in _BLOCK_TAGS
            if is_block:
                yield "\n\n" if child.name in ("p", "pre") or child.name.startswith("h") else "\n"
            yield from [child.get_text()] if child.name == "pre" else _html_text(child)
            if is_block:
                yield "\n"
        elif isinstance(child, NavigableString) and not isinstance(child, PreformattedString):
            yield re.sub(r"\s+", " ", child)  # PreformattedString: comments, doctypes and the like
