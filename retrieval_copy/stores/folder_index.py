"""Indexes a folder of files as passages, for BM25 and for any LangChain vector store.

Knows files, splitting and the previous state of the index. Does not know queries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore
from rich.console import Console
from rich.progress import track

from retrieval_copy.prompting import in_context
from retrieval_copy.stores.files import PARSERS, UnreadableFileError, from_home, load_file, printable

if TYPE_CHECKING:
    from langchain_text_splitters import TextSplitter

PASSAGE_CHARACTERS, OVERLAP_CHARACTERS = 800, 80
_START = "start_index"
_CJK_SENTENCE_END = "(?<=[。！？])"
# Where nothing else separates, as in encoded data: splitting by characters takes hours for a large file.
_UNBROKEN = r"\S{80}"
_NAMESPACE = uuid.UUID("2a4a9dd6-86c5-4d2b-8a5d-3a9e5d1f6f0e")
FORMAT = 3
"""Changes when an index of the same files would have other passages, or is written in another way."""

# Passages are embedded in batches across files: small files one by one take several times as long.
_BATCH_PASSAGES = 256
_LOCK_FILE = "~$"  # Word puts one beside an open document

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexReport:
    """The result of an update; files are given by their path within the folder.

    What was read before of a skipped file or folder stays in the index if the fault may pass: a folder that
    cannot be listed, or is suddenly empty, loses no file.
    """

    indexed: list[str]  # new or changed since the last update
    unchanged: list[str]  # not read again
    removed: list[str]  # they no longer exist
    skipped: dict[str, str]  # unreadable files and folders, with the reason
    num_passages: int  # now in the index


@dataclass
class _File:
    """The index entry of a file."""

    size: int
    modified_ns: int
    passages: list[Document] = field(default_factory=list)
    unreadable: str | None = None


class FolderIndex:
    """The passages of all files of a folder.

    A file whose size and modification time are unchanged is neither read nor embedded again. A file that
    cannot be read is skipped and reported; it never stops the others.

    The passages are kept in memory: ten thousand files of 50 MB take 130 MB, 550 MB while BM25 indexes them.

    Args:
        folder: Read recursively, except hidden files and folders. Links to files are followed, links to
            folders are not.
        state: File that stores the index between runs; ``None`` keeps it in memory.
        store: Vector store to keep in sync, if any. Use a separate collection for each index.
        splitter: Splits documents into passages; by default LangChain's recursive one, below each heading.

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
        self.folder = from_home(folder)
        if not os.path.isdir(self.folder):  # Path.is_dir raises where it may not look
            endings = ", ".join(PARSERS)
            raise NotADirectoryError(f"{self.folder} is not a folder; give one with {endings} files")
        self.state = from_home(state) if state is not None else None
        self.store = store
        self._splitter = splitter or _default_splitter()
        self._files = self._read_state()

    @property
    def documents(self) -> list[Document]:
        """All passages, file by file; ``metadata`` has ``source`` and ``start_index``, the offset in it."""
        return [passage for known in self._files.values() for passage in known.passages]

    def update(self, *, console: Console | None = None) -> IndexReport:
        """Brings the index up to date with the folder.

        Args:
            console: Shows a progress bar there, if given.
        """
        skipped: dict[str, str] = {}
        paths = {printable(path.relative_to(self.folder)): path for path in self._walk(skipped)}
        unseen = tuple("" if folder == "." else f"{folder}/" for folder in skipped)
        removed = [source for source in self._files if source not in paths and not source.startswith(unseen)]
        changed = [source for source, path in paths.items() if self._has_changed(source, path)]
        shown = track(changed, "Indexing", console=console) if console is not None and changed else changed
        try:
            for source in removed:
                self._forget(source)
            self._index(paths, shown)
        finally:  # keep the finished files even if the store fails or the user interrupts
            self._write_state()
        skipped |= {source: known.unreadable for source, known in self._files.items() if known.unreadable}
        return IndexReport(
            indexed=[source for source in changed if source not in skipped],
            unchanged=[source for source in paths if source not in {*changed, *skipped}],
            removed=removed,
            skipped=skipped,
            num_passages=len(self.documents),
        )

    def _walk(self, skipped: dict[str, str]) -> Iterator[Path]:
        """The files to read; folders that cannot be listed are added to ``skipped``."""

        def note(error: OSError) -> None:
            reason = f"{error.strerror or error}; what was read of it before is kept"
            skipped[printable(Path(error.filename).relative_to(self.folder))] = reason

        for path, folders, names in os.walk(self.folder, onerror=note):
            if self._files and not folders and not names and Path(path) == self.folder:
                skipped["."] = "it is empty, as if not mounted; what was read of it before is kept"
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if Path(name).suffix.lower() in PARSERS and not name.startswith((".", _LOCK_FILE)):
                    yield Path(path, name)

    def _has_changed(self, source: str, path: Path) -> bool:
        known = self._files.get(source)
        return known is None or (known.size, known.modified_ns) != _stamp(path)

    def _index(self, paths: dict[str, Path], sources: Iterable[str]) -> None:
        """Reads files, and stores their passages in batches across files."""
        pending: dict[str, _File] = {}
        for source in sources:
            read, known = self._read(source, paths[source]), self._files.get(source)
            if known and known.passages and read.unreadable and not read.modified_ns:  # the fault may pass
                reason = f"{read.unreadable}; what was read of it before is kept"
                self._files[source] = replace(known, modified_ns=0, unreadable=reason)
                continue
            self._forget(source)
            pending[source] = read
            if sum(len(known.passages) for known in pending.values()) >= _BATCH_PASSAGES:
                self._add(pending)
                pending = {}
        self._add(pending)

    def _read(self, source: str, path: Path) -> _File:
        size, modified_ns = _stamp(path)
        try:
            passages = [one for document in load_file(path, source=source) for one in self._split(document)]
        except UnreadableFileError as error:
            if isinstance(error.__cause__, ImportError):
                _log.warning("%s is skipped: %s", source, error)
            return _File(size, 0 if error.may_pass else modified_ns, unreadable=str(error))
        for number, passage in enumerate(passages):
            digest = hashlib.sha256(passage.page_content.encode("utf-8", "replace")).hexdigest()
            passage.id = str(uuid.uuid5(_NAMESPACE, f"{source}:{number}:{digest}"))
        return _File(size, modified_ns, passages)

    def _split(self, document: Document) -> Iterator[Document]:
        """The passages of ``document``: none goes across a heading, and each knows those above it."""
        metadata, text = dict(document.metadata), document.page_content
        sections = [(0, ""), *metadata.pop("headings", [])]
        ends = [*(start for start, _ in sections[1:]), len(text)]
        for (start, heading), end in zip(sections, ends, strict=True):
            known = {**metadata, "heading": heading} if heading else metadata
            for passage in self._splitter.split_documents([Document(text[start:end], metadata=known)]):
                if _START in passage.metadata:
                    passage.metadata[_START] += start
                yield passage

    def _add(self, files: dict[str, _File]) -> None:
        """Stores the passages of ``files`` and adds these to the index."""
        passages = [passage for known in files.values() for passage in known.passages]
        for start in range(0, len(passages) if self.store is not None else 0, _BATCH_PASSAGES):
            batch = [
                Document(in_context(passage), id=passage.id, metadata=passage.metadata)
                for passage in passages[start : start + _BATCH_PASSAGES]
            ]
            assert self.store is not None
            self.store.add_documents(batch, ids=[str(passage.id) for passage in batch])
        self._files |= files

    def _forget(self, source: str) -> None:
        known = self._files.get(source)
        if known and known.passages and self.store is not None:
            ids = [str(passage.id) for passage in known.passages]
            if self.store.delete(ids) is False:
                raise RuntimeError(f"the store does not delete the passages of {source}; it is unchanged")
        self._files.pop(source, None)

    def _read_state(self) -> dict[str, _File]:
        """The previous index; empty if it cannot be read or the store does not contain it."""
        if self.state is None:
            return {}
        files: dict[str, _File] = {}
        try:
            with self.state.open(encoding="utf-8") as lines:
                if json.loads(next(lines)) != self._header:
                    return {}
                for line in lines:
                    source, passages, known = json.loads(line)
                    files[source] = _File(passages=[Document(**one) for one in passages], **known)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, StopIteration):  # any damage
            return {}
        first = [str(known.passages[0].id) for known in files.values() if known.passages][:1]
        is_stored = self.store is None or not first or self.store.get_by_ids(first)
        return files if is_stored else {}

    def _write_state(self) -> None:
        """Writes a line per file, so that the whole is never in memory a second time."""
        if self.state is None:
            return
        self.state.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.state.with_suffix(".unfinished")
        with unfinished.open("w", encoding="utf-8") as lines:
            lines.write(json.dumps(self._header) + "\n")
            for source, known in self._files.items():
                passages = [passage.model_dump(exclude={"type"}) for passage in known.passages]
                entry = {name: value for name, value in vars(known).items() if name != "passages"}
                lines.write(json.dumps([source, passages, entry]) + "\n")
        unfinished.replace(self.state)

    @property
    def _header(self) -> dict[str, Any]:
        return {"format": FORMAT, "folder": str(self.folder.resolve())}


def _stamp(path: Path) -> tuple[int, int]:
    """Size and modification time; -1 for a broken link."""
    try:
        now = path.stat()
    except OSError:
        return -1, -1
    return now.st_size, now.st_mtime_ns


def _default_splitter() -> TextSplitter:
    try:
        from langchain_text_splitters import RecursiveCharacterTextSplitter
    except ImportError as error:
        raise ImportError("FolderIndex needs splitters: pip install '.[rag]' in a checkout") from error
    return RecursiveCharacterTextSplitter(
        ["\n\n", "\n", _CJK_SENTENCE_END, " ", _UNBROKEN],
        is_separator_regex=True,
        chunk_size=PASSAGE_CHARACTERS,
        chunk_overlap=OVERLAP_CHARACTERS,
        add_start_index=True,
        strip_whitespace=True,
    )
