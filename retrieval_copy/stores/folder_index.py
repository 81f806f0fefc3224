"""Indexes a folder of files as passages, for BM25 and for any LangChain vector store.

Knows files, splitting and the previous state of the index. Does not know queries.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore
from rich.console import Console
from rich.progress import track

from retrieval_copy.stores.files import PARSERS, UnreadableFileError, load_file, printable

if TYPE_CHECKING:
    from langchain_text_splitters import TextSplitter

PASSAGE_CHARACTERS, OVERLAP_CHARACTERS = 800, 80
_NAMESPACE = uuid.UUID("2a4a9dd6-86c5-4d2b-8a5d-3a9e5d1f6f0e")
_FORMAT = 1


@dataclass(frozen=True)
class IndexReport:
    """The result of an update; files are given by their path within the folder.

    Attributes:
        indexed: Files that are new or changed since the last update.
        unchanged: Files that are unchanged and were not read.
        removed: Files that no longer exist.
        skipped: Unreadable files, with the reason.
        num_passages: Number of passages now in the index.
    """

    indexed: list[str]
    unchanged: list[str]
    removed: list[str]
    skipped: dict[str, str]
    num_passages: int


@dataclass
class _File:
    """The index entry of a file."""

    size: int
    modified_ns: int
    passages: list[dict[str, Any]] = field(default_factory=list)
    unreadable: str | None = None


class FolderIndex:
    """The passages of all files of a folder.

    A file whose size and modification time are unchanged is neither read nor embedded again.

    Args:
        folder: Read recursively, except hidden files and folders.
        state: JSON file that stores the index between runs; ``None`` keeps it in memory.
        store: Vector store to keep in sync, if any. Use a separate collection for each index.
        splitter: Splits documents into passages; by default LangChain's recursive splitter for Markdown.

    Raises:
        NotADirectoryError: There is no such folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        state: str | Path | None = None,
        store: VectorStore | None = None,
        splitter: TextSplitter | None = None,
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            endings = ", ".join(PARSERS)
            raise NotADirectoryError(f"{self.folder} is not a folder; give one with {endings} files")
        self.state = Path(state) if state is not None else None
        self.store = store
        self._splitter = splitter or _markdown_splitter()
        self._files = self._read_state()

    @property
    def documents(self) -> list[Document]:
        """All passages, file by file; ``metadata`` has ``source`` and ``start_index``, the offset in it."""
        return [Document(**passage) for known in self._files.values() for passage in known.passages]

    def update(self, *, console: Console | None = None) -> IndexReport:
        """Brings the index up to date with the folder.

        Args:
            console: Shows a progress bar there, if given.
        """
        paths = {printable(path.relative_to(self.folder)): path for path in _files_of(self.folder)}
        removed = [source for source in self._files if source not in paths]
        changed = [source for source, path in paths.items() if self._has_changed(source, path)]
        try:
            for source in removed:
                self._forget(source)
            steps: Iterable[str] = changed
            if console is not None and changed:
                steps = track(changed, "Indexing", console=console)
            for source in steps:
                self._index(source, paths[source])
        finally:  # keep the finished files even if another fails
            self._write_state()
        skipped = {source: known.unreadable for source, known in self._files.items() if known.unreadable}
        return IndexReport(
            indexed=[source for source in changed if source not in skipped],
            unchanged=[source for source in paths if source not in changed and source not in skipped],
            removed=removed,
            skipped=skipped,
            num_passages=sum(len(known.passages) for known in self._files.values()),
        )

    def _has_changed(self, source: str, path: Path) -> bool:
        known = self._files.get(source)
        return known is None or (known.size, known.modified_ns) != _stamp(path)

    def _index(self, source: str, path: Path) -> None:
        self._forget(source)
        known = _File(*_stamp(path))
        try:
            passages = self._splitter.split_documents(load_file(path, source=source))
        except UnreadableFileError as error:
            known.unreadable = str(error)
        else:
            for number, passage in enumerate(passages):
                digest = hashlib.sha256(passage.page_content.encode("utf-8", "replace")).hexdigest()
                passage.id = str(uuid.uuid5(_NAMESPACE, f"{source}:{number}:{digest}"))
            if self.store is not None and passages:
                self.store.add_documents(passages, ids=[str(passage.id) for passage in passages])
            known.passages = [
                {"id": passage.id, "page_content": passage.page_content, "metadata": passage.metadata}
                for passage in passages
            ]
        self._files[source] = known

    def _forget(self, source: str) -> None:
        known = self._files.pop(source, None)
        if known and known.passages and self.store is not None:
            self.store.delete([passage["id"] for passage in known.passages])

    def _read_state(self) -> dict[str, _File]:
        """The previous index; empty if it cannot be read or the store does not contain it."""
        try:
            record = json.loads(self.state.read_text("utf-8")) if self.state else {}
            if record.get("format") != _FORMAT or record.get("folder") != str(self.folder.resolve()):
                return {}
            files = {source: _File(**known) for source, known in record["files"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # any damage
            return {}
        first = next((passage["id"] for known in files.values() for passage in known.passages), None)
        if self.store is not None and first is not None and not self.store.get_by_ids([first]):
            return {}
        return files

    def _write_state(self) -> None:
        if self.state is None:
            return
        record = {
            "format": _FORMAT,
            "folder": str(self.folder.resolve()),
            "files": {source: asdict(known) for source, known in self._files.items()},
        }
        self.state.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.state.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        unfinished.replace(self.state)


def _files_of(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in PARSERS:
                yield Path(path, name)


def _stamp(path: Path) -> tuple[int, int]:
    """Size and modification time; -1 for a broken link."""
    try:
        now = path.stat()
    except OSError:
        return -1, -1
    return now.st_size, now.st_mtime_ns


def _markdown_splitter() -> TextSplitter:
    try:
        from langchain_text_splitters import Language, RecursiveCharacterTextSplitter
    except ImportError as error:
        raise ImportError(
            "FolderIndex needs LangChain's splitters: pip install '.[rag]' in a checkout"
        ) from error
    return RecursiveCharacterTextSplitter.from_language(
        Language.MARKDOWN,
        chunk_size=PASSAGE_CHARACTERS,
        chunk_overlap=OVERLAP_CHARACTERS,
        add_start_index=True,
        strip_whitespace=True,
    )
