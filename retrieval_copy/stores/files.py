"""Loads text, Markdown, HTML, PDF, Word files and notebooks as LangChain documents with blob parsers.

Knows file formats. Does not know folders, indexes or splitting. Needs the ``documents`` extra, which the
``rag`` extra contains, for all formats but text in Unicode.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.document_loaders import BaseBlobParser
from langchain_core.documents import Document
from langchain_core.documents.base import Blob

from retrieval_copy.stores.encodings import NotTextError, decoded

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag
    from pypdf import PageObject

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

_DOCX_TITLE = "p[style-name='Title'] => h1:fresh"

MAX_FILE_BYTES = 16_000_000
"""Largest file that is read; of a Word file, its unpacked size. HTML of this size takes 700 MB of memory.
PDF files may be larger, because they are read page by page."""
_MAX_PDF_BYTES = 512_000_000
_PDF_HEADER, _PDF_HEADER_WITHIN = b"%PDF-", 1024
_MOST_OUTPUT_CHARACTERS = 2_000
_MOST_ROW_CHARACTERS = 400  # a longer one lays out a page


class UnreadableFileError(ValueError):
    """A file has no readable text; the message says why.

    Attributes:
        may_pass: Whether the same file may be readable later, because the fault lies outside of it.
    """

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


class TextParser(BaseBlobParser):
    """Parses plain text and Markdown, in any usual encoding."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with its first heading as ``title``.

        Raises:
            NotTextError: The bytes are not text.
        """
        text = _plain_newlines(decoded(blob.as_bytes(), name=_name_of(blob)))
        yield Document(text, metadata={**blob.metadata, **_titled(text)})


class HtmlParser(BaseBlobParser):
    """Converts HTML to text, one line per block, without scripts and styles."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with the page's title as ``title``.

        Raises:
            NotTextError: The bytes are not text.
        """
        from bs4.dammit import EncodingDetector

        content = blob.as_bytes()
        declared = EncodingDetector.find_declared_encoding(content, is_html=True)
        yield _html_document(decoded(content, name=_name_of(blob), declared=declared), blob)


class DocxParser(BaseBlobParser):
    """Parses Word files: paragraphs, lists, tables, footnotes and text boxes, one line each."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with its first title or heading as ``title``.

        Raises:
            UnreadableFileError: The file is too large when it is unpacked.
        """
        from mammoth import convert_to_html

        with blob.as_bytes_io() as stream:
            with zipfile.ZipFile(stream) as parts:
                _check_size(
                    sum(part.file_size for part in parts.infolist() if part.filename.endswith(".xml"))
                )
            page = convert_to_html(stream, style_map=_DOCX_TITLE, convert_image=lambda image: []).value
        yield _html_document(page, blob)


class NotebookParser(BaseBlobParser):
    """Parses Jupyter notebooks: the source of all cells, and their output as far as it is text."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text of all cells, with the first heading as ``title``."""
        import nbformat

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cells without ids and the like, which do not matter here
            notebook = nbformat.reads(decoded(blob.as_bytes(), name=_name_of(blob)), as_version=4)
        text = "\n\n".join(
            part.strip() for cell in notebook.cells for part in _cell_texts(cell) if part.strip()
        )
        yield Document(text, metadata={**blob.metadata, **_titled(text)})


class PdfParser(BaseBlobParser):
    """Parses PDF into one document per page."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text of each page that has text, with ``page`` counted from 1.

        A damaged page is left out, with a warning in the log.

        Raises:
            UnreadableFileError: The file is broken or protected by a password.
        """
        from pypdf import PdfReader

        with blob.as_bytes_io() as stream:
            if _PDF_HEADER not in stream.read(_PDF_HEADER_WITHIN):
                raise UnreadableFileError("not a readable PDF file (it does not begin like one)")
            reader = PdfReader(stream)
            title = reader.metadata.title if reader.metadata else None
            titled = {**blob.metadata, **({"title": str(title)} if title else {})}
            for number in range(len(reader.pages)):
                try:
                    text = _page_text(reader.pages[number])
                except Exception as error:  # pypdf raises many types for broken pages
                    _log.warning("page %d of %s is left out: %s", number + 1, _name_of(blob), _said(error))
                    continue
                if text:
                    yield Document(text, metadata={**titled, "page": number + 1})


_TEXT = (".txt", ".text", ".log", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex")
PARSERS: dict[str, BaseBlobParser] = {
    **dict.fromkeys(_TEXT, TextParser()),
    **dict.fromkeys((".html", ".htm", ".xhtml"), HtmlParser()),
    ".pdf": PdfParser(),
    ".docx": DocxParser(),
    ".ipynb": NotebookParser(),
}
"""Parsers by file suffix, in lower case."""


def load_file(path: Path, *, source: str | None = None) -> list[Document]:
    """Loads a file as one document, or one per page.

    Args:
        path: The file.
        source: The ``source`` metadata of its documents; by default the path, see :func:`printable`.

    Raises:
        UnreadableFileError: The file has no readable text or an unknown suffix, or a package is not
            installed that its format needs. No file raises anything else.
    """
    suffix = path.suffix.lower()
    parser = PARSERS.get(suffix)
    if parser is None:
        raise UnreadableFileError(f"{path.suffix or 'no ending'} is none of {', '.join(PARSERS)}")
    source = source or printable(path)
    blob = Blob.from_path(path, metadata={"source": source})
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise UnreadableFileError("it is not a regular file")
        if status.st_size == 0:
            raise UnreadableFileError("it is empty")
        _check_size(status.st_size, _MAX_PDF_BYTES if suffix == ".pdf" else MAX_FILE_BYTES)
        documents = [document for document in parser.lazy_parse(blob) if document.page_content.strip()]
    except Exception as error:  # parsers raise many types for broken files
        raise _unreadable(error, suffix) from error
    if not documents:
        raise UnreadableFileError("it holds no text")
    return documents


def _unreadable(error: Exception, suffix: str) -> UnreadableFileError:
    match error:
        case UnreadableFileError():
            return error
        case NotTextError():
            return UnreadableFileError(str(error))
        case OSError():
            return UnreadableFileError(error.strerror or str(error), may_pass=True)
        case ImportError():
            said = f"{suffix} files need the package {error.name}: pip install '.[documents]' in a checkout"
            return UnreadableFileError(said, may_pass=True)
    return UnreadableFileError(f"not a readable {suffix[1:].upper()} file ({_said(error)})")


def printable(path: Path) -> str:
    r"""``path`` as text that can be stored and shown: bytes that are not UTF-8 stand as ``\xff``."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _check_size(num_bytes: int, limit: int = MAX_FILE_BYTES) -> None:
    if num_bytes > limit:
        raise UnreadableFileError(f"it has {num_bytes / 1e6:,.0f} MB, more than {limit / 1e6:,.0f} MB")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _name_of(blob: Blob) -> str:
    return str(blob.source or "the file")


def _plain_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _titled(text: str) -> dict[str, str]:
    """``title``: the first Markdown heading near the start, if there is one."""
    heading = _HEADING.search(text[:2000])
    return {"title": (heading[1] or heading[2]).strip()} if heading else {}


def _page_text(page: PageObject) -> str:
    utf16 = page.extract_text().encode("utf-16", "surrogatepass")  # may hold halves of one character
    return utf16.decode("utf-16", "replace").strip()


def _cell_texts(cell: Any) -> Iterator[str]:
    yield cell.source
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/plain") or ""
        yield text[:_MOST_OUTPUT_CHARACTERS]


def _html_document(page: str, blob: Blob) -> Document:
    from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)  # the HTML parser reads XHTML well enough
        soup = BeautifulSoup(page, "html.parser")
    metadata = dict(blob.metadata)
    heading = soup.title or soup.h1
    if heading and (title := heading.get_text(" ", strip=True)):
        metadata["title"] = " ".join(title.split())
    for tag in soup(_NO_TEXT_TAGS):
        tag.decompose()
    text = _SPACES.sub("\n", "".join(_html_text(soup)))
    return Document(_BLANK_LINES.sub("\n\n", text).strip(), metadata=metadata)


def _html_text(soup: BeautifulSoup) -> Iterator[str]:
    """The text, with line breaks around blocks. Not recursive: some pages nest deeper than Python may."""
    from bs4.element import NavigableString, PreformattedString, Tag

    open_tags: list[tuple[Tag, Iterator[object]]] = [(soup, iter(soup.children))]
    while open_tags:
        parent, children = open_tags[-1]
        child = next(children, None)
        if child is None:
            open_tags.pop()
            yield "\n" if parent.name in _BLOCK_TAGS else ""
        elif isinstance(child, Tag):
            if child.name in _BLOCK_TAGS:
                yield "\n\n" if child.name in ("p", "pre") or child.name.startswith("h") else "\n"
            if child.name == "pre":
                yield child.get_text() + "\n"
            elif child.name == "tr" and (row := _table_row(child)):
                yield row + "\n"
            else:
                open_tags.append((child, iter(child.children)))
        elif isinstance(child, NavigableString) and not isinstance(child, PreformattedString):
            yield re.sub(r"\s+", " ", child)  # PreformattedString: comments, doctypes and the like


def _table_row(row: Tag) -> str:
    """The cells of a row in one line, so that they are read together; empty if they are not of one line."""
    cells = [" ".join(cell.get_text(" ").split()) for cell in row.find_all(("td", "th"), recursive=False)]
    line = " | ".join(filter(None, cells))
    return line if len(line) <= _MOST_ROW_CHARACTERS and row.find("table") is None else ""
