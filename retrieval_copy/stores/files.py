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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from langchain_core.document_loaders import BaseBlobParser
from langchain_core.documents import Document
from langchain_core.documents.base import Blob

from retrieval_copy.stores.encodings import NotTextError, decoded, in_unicode
from retrieval_copy.stores.markup import MarkedUp, read_csv, read_html, read_markdown, read_text

_log = logging.getLogger(__name__)

_DOCX_TITLE = "p[style-name='Title'] => h1:fresh"

MAX_FILE_BYTES = 16_000_000
"""Largest file that is read; of a Word file, its unpacked size. HTML of this size takes 700 MB of memory.
PDF files may be larger, because they are read page by page."""
_MAX_PDF_BYTES = 512_000_000
_OTHERS = {b"%PDF-": "a PDF file", b"{\\rtf": "an RTF file", b"version https://git-lfs": "a Git LFS pointer"}
_MOST_OUTPUT_CHARACTERS = 2_000
# What a page declares, read as browsers do: in its beginning.
_DECLARED_WITHIN = 4096
_DECLARED = re.compile(
    rb"""<\?xml[^>]*?\bencoding\s*=\s*["']\s*([\w.:-]+)|<meta[^>]+?\bcharset\s*=\s*["']?\s*([\w.:-]+)""",
    re.IGNORECASE,
)


class UnreadableFileError(ValueError):
    """A file has no readable text; the message says why, ``may_pass`` whether the fault is not its own."""

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


class TextParser(BaseBlobParser):
    """Parses text, in any usual encoding.

    Args:
        read: Finds headings and tables in it; by default those of Markdown.
    """

    def __init__(self, read: Callable[[str], MarkedUp] = read_markdown) -> None:
        self._read = read

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text as it stands, except that tables become a line per row."""
        yield _document(blob, self._read(_text(blob)))


class HtmlParser(BaseBlobParser):
    """Converts HTML to text, one line per block and row, without scripts and styles."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with the page's title as ``title``."""
        declared = _DECLARED.search(blob.as_bytes()[:_DECLARED_WITHIN])
        name = (declared[1] or declared[2]).decode() if declared else None
        yield _document(blob, read_html(_text(blob, declared=name)))


class DocxParser(BaseBlobParser):
    """Parses Word files: paragraphs, lists, tables, footnotes and text boxes, one line each."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text, with its first title or heading as ``title``."""
        from mammoth import convert_to_html

        with blob.as_bytes_io() as stream:
            with zipfile.ZipFile(stream) as parts:
                texts = (part for part in parts.infolist() if part.filename.endswith(".xml"))
                _check_size(sum(part.file_size for part in texts))
            page = convert_to_html(stream, style_map=_DOCX_TITLE, convert_image=lambda image: []).value
        yield _document(blob, read_html(page))


class NotebookParser(BaseBlobParser):
    """Parses Jupyter notebooks: the source of all cells, and their output as far as it is text."""

    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        """Yields the text of all cells, with the first heading as ``title``."""
        import nbformat

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cells without ids and the like, which do not matter here
            notebook = nbformat.reads(_text(blob), as_version=4)
        whole = MarkedUp("")
        for cell in notebook.cells:
            is_prose = cell.cell_type == "markdown"
            for text in filter(None, map(str.strip, _cell_texts(cell))):
                whole = whole.followed_by(read_markdown(text) if is_prose else MarkedUp(text))
        yield _document(blob, whole)


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
            reader = PdfReader(stream)
            title = reader.metadata.title if reader.metadata else None
            for number in range(len(reader.pages)):
                try:
                    text = reader.pages[number].extract_text().strip()
                except Exception as error:  # pypdf raises many types for broken pages
                    _log.warning("page %d of %s is left out: %s", number + 1, blob.source, _said(error))
                    continue
                if text:
                    yield _document(blob, MarkedUp(text, title=str(title or "")), page=number + 1)


_PLAIN_TEXT = (".text", ".log", ".rst", ".adoc", ".org", ".tex")
PARSERS: dict[str, BaseBlobParser] = {
    **dict.fromkeys((".txt", ".md", ".markdown"), TextParser()),
    **dict.fromkeys(_PLAIN_TEXT, TextParser(read_text)),
    **dict.fromkeys((".csv", ".tsv"), TextParser(read_csv)),
    **dict.fromkeys((".html", ".htm", ".xhtml"), HtmlParser()),
    ".pdf": PdfParser(),
    ".docx": DocxParser(),
    ".ipynb": NotebookParser(),
}
"""Parsers by file suffix, in lower case."""


def load_file(path: Path, *, source: str | None = None) -> list[Document]:
    """Loads a file as one document, or one per page.

    Its ``title`` is that of the document, or the file's name. If there are others, ``headings`` holds where
    the text below each starts, and the path to it.

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
    for document in documents:
        document.metadata.setdefault("title", printable(Path(path.name)))
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


def from_home(path: str | Path) -> Path:
    """``path`` with a leading ``~`` replaced by the home folder, if there is such a user."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises where there is none


def printable(path: Path) -> str:
    r"""``path`` as text that can be stored and shown: bytes that are not UTF-8 stand as ``\xff``."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _check_size(num_bytes: int, limit: int = MAX_FILE_BYTES) -> None:
    if num_bytes > limit:
        raise UnreadableFileError(f"it has {num_bytes / 1e6:,.0f} MB, more than {limit / 1e6:,.0f} MB")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _text(blob: Blob, *, declared: str | None = None) -> str:
    for beginning, kind in _OTHERS.items():
        if blob.as_bytes().startswith(beginning):
            raise UnreadableFileError(f"it is {kind}, not what its ending says")
    text = decoded(blob.as_bytes(), name=str(blob.source), declared=declared)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _document(blob: Blob, read: MarkedUp, **metadata: Any) -> Document:
    """What was read as a document, with ``title`` and ``headings`` where there are any."""
    if read.title:
        metadata = {"title": in_unicode(read.title), **metadata}
    if sections := read.sections():
        metadata["headings"] = sections
    return Document(in_unicode(read.text), metadata={**blob.metadata, **metadata})


def _cell_texts(cell: Any) -> Iterator[str]:
    yield cell.source
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/plain") or ""
        yield text[:_MOST_OUTPUT_CHARACTERS]
