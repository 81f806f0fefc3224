"""Loads text, Markdown, HTML and PDF files as LangChain documents with LangChain blob parsers.

Knows file formats. Does not know folders, indexes or splitting. Needs the ``rag`` extra for HTML and PDF.
"""

from __future__ import annotations

import codecs
import logging
import os
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

_log = logging.getLogger(__name__)

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
_BYTE_ORDER_MARKS = (  # the longest first: that of UTF-32 begins like that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# The end of a UTF-8 file that was cut within a character, unless a single letter of Windows-1252 is likelier.
_CUT_END = re.compile(rb"(?:[\xc2\xc3]|[\xe0-\xef][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{1,2})\Z")
_REPLACED = "\ufffd"
# A text of which a larger share cannot be decoded is none; one character always may be damaged.
_MOST_REPLACED = 0.1


class UnreadableFileError(ValueError):
    """A file has no readable text; the message says why."""


class TextParser(BaseBlobParser):
    """Parses plain text and Markdown in UTF-8, UTF-16 or UTF-32, with Windows-1252 as fallback."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with its first heading as ``title``.

        Raises:
            UnreadableFileError: The bytes are not text.
        """
        content = blob.as_bytes()
        text = _decoded(content, _encoding_of(content), blob)
        if _CONTROL.search(text) or text.count(_REPLACED) > 1 + _MOST_REPLACED * len(text):
            raise UnreadableFileError("the bytes are not text")
        text = text.replace("\r\n", "\n")
        metadata = dict(blob.metadata)
        if heading := _HEADING.search(text[:2000]):
            metadata["title"] = (heading[1] or heading[2]).strip()
        yield Document(text, metadata=metadata)


class HtmlParser(BaseBlobParser):
    """Converts HTML to text, one line per block, without scripts and styles."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with the page's title as ``title``."""
        from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
        from bs4.dammit import EncodingDetector

        content = blob.as_bytes()
        declared = EncodingDetector.find_declared_encoding(content, is_html=True)
        text = _decoded(content, _encoding_of(content, declared), blob)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)  # the HTML parser reads XHTML well enough
            soup = BeautifulSoup(text, "html.parser")
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
                    utf16 = page.extract_text().encode("utf-16", "surrogatepass")  # may be halves of one
                    if text := utf16.decode("utf-16", "replace").strip():
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
        source: The ``source`` metadata of its documents; by default the path, see :func:`printable`.

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
    source = source or printable(path)
    blob = Blob.from_data(content, path=source, metadata={"source": source})
    documents = [document for document in parser.lazy_parse(blob) if document.page_content.strip()]
    if not documents:
        raise UnreadableFileError("it holds no text")
    return documents


def printable(path: Path) -> str:
    r"""``path`` as text that can be stored and shown: bytes that are not UTF-8 stand as ``\xff``."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _decoded(content: bytes, encoding: str, blob: Blob) -> str:
    """Decodes ``content``, with U+FFFD and a warning for what is damaged."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        text = content.decode(encoding, "replace")
    _log.warning(
        "%s has bytes that are not %s; they were replaced, the rest is read",
        blob.metadata.get("source") or blob.path or "the file",
        encoding.upper(),
    )
    return text


def _encoding_of(content: bytes, declared: str | None = None) -> str:
    """The encoding of ``content``: by its byte order mark, by what it declares, or the likeliest."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            return encoding
    if declared is not None:
        try:
            content.decode(declared, "replace")
            name = codecs.lookup(declared).name
        except (LookupError, ValueError):  # no encoding, or none of text
            name = "utf-8"
        if not name.startswith("utf"):  # what declares UTF-16 in readable ASCII is not in UTF-16
            return "cp1252" if name in ("ascii", "iso8859-1") else name  # as browsers read these
    try:
        content.decode("cp1252")
    except UnicodeDecodeError:
        return "utf-8"
    return "utf-8" if _looks_like_utf8(content) else "cp1252"


def _looks_like_utf8(content: bytes) -> bool:
    """Whether most bytes beyond ASCII form characters of UTF-8, so that the others are damage."""
    text = content.decode("utf-8", "replace")
    num_replaced = text.count(_REPLACED)
    num_decoded = sum(character > "\x7f" for character in text) - num_replaced
    # In Windows-1252 0xff is a letter that hardly any text has.
    evidence = num_decoded + content.count(b"\xff") + bool(_CUT_END.search(content))
    return evidence >= num_replaced


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
