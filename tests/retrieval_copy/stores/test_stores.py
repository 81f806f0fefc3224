"""Real stores, on disk and in memory: BM25, Qdrant, LangChain's own; and the folder index that feeds them."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests, RetrieversIntegrationTests
from rich.console import Console

from retrieval_copy import (
    BM25Retriever,
    FolderIndex,
    HybridRetriever,
    RetrievalCopyChain,
    RetrievalError,
    SentenceEmbeddings,
    SimilarAnswers,
    Situation,
    qdrant_store,
)
from retrieval_copy.citations.questions import Question
from retrieval_copy.citations.sentences import placed_sentences
from retrieval_copy.stores.files import load_file
from retrieval_copy.stores.folder_index import FORMAT
from tests.retrieval_copy.fakes import CLAY, GLAZE, QUESTION, QuotingModel, assert_literal
from tests.retrieval_copy.installed import markdown_files
from tests.servers import free_port

FAKE = DeterministicFakeEmbedding(size=32)


class TestBM25Suite(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return BM25Retriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"documents": [Document(f"kiln number {number}") for number in range(5)]}

    @property
    def retriever_query_example(self) -> str:
        return "Which kiln?"


class TestEmbeddingsSuite(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return SentenceEmbeddings


@pytest.fixture(scope="module")
def embeddings() -> SentenceEmbeddings:
    return SentenceEmbeddings()


# BM25 ----------------------------------------------------------------------------------------------


def test_rarer_words_count_more_and_case_does_not() -> None:
    found = BM25Retriever(documents=[CLAY, GLAZE], k=1)
    assert found.invoke("the LUMPS of the glaze") == [GLAZE]
    assert found.invoke("greenware") == [CLAY]
    assert found.invoke("the kiln", k=2) == [CLAY, GLAZE] or found.invoke("the kiln", k=2) == [GLAZE, CLAY]


def test_what_shares_no_word_is_not_found() -> None:
    assert BM25Retriever(documents=[CLAY]).invoke("窑炉 zebra ...") == []
    for nothing in ([], [Document("")], [Document("?!")]):
        assert BM25Retriever(documents=nothing).invoke("kiln") == []
    assert BM25Retriever(documents=[CLAY]).invoke("kiln", k=0) == []


def test_scripts_without_spaces_are_found_by_their_characters() -> None:
    chinese = Document("窑炉冷却到八十度时可以打开")
    assert BM25Retriever(documents=[CLAY, chinese], k=1).invoke("什么时候打开窑炉？") == [chinese]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("cafe\u0301", "café"),
        ("café", "CAFE\u0301"),
        ("die STRASSE", "straße"),
        ("oﬃce", "office"),
        ("Ｋｉｌｎ", "kiln"),
        ("ガス", "ｶﾞｽ"),
        ("\u1100\u1161", "가"),
        ("ki\u00adln", "kiln"),
        ("the ope-\nning of it", "opening"),
        ("don’t", "don't"),
    ],
)
def test_neither_case_nor_typography_matters(text: str, query: str) -> None:
    document = Document(text)
    found = BM25Retriever(documents=[CLAY, document], k=1)
    assert found.invoke(query) == [document]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Einstein's kiln", "Einstein"),
        ("Einstein", "Einstein’s"),
        ("l'argile", "argile"),
        ("O’Brien", "o'brien"),
        ("도서관에서", "도서관"),
        ("집", "집에"),
        ("ΘΕΜΑ", "θέμα"),
        ("θέματα", "θέμα"),
        ("ışık", "IŞIK"),
        ("İstanbul", "istanbul"),
        ("كِتَابٌ", "كتاب"),
        ("الكتاب", "كتاب"),
        ("ёлка", "елки"),
        ("за́мок", "замок"),
        ("שָׁלוֹם", "שלום"),
        ("किताबें", "किताब"),
        ("Łódź", "lodz"),
        ("the firings of pots", "pot firing"),
    ],
)
def test_forms_of_a_word_find_each_other(text: str, query: str) -> None:
    for kept, asked in ((text, query), (query, text)):
        document = Document(kept)
        assert BM25Retriever(documents=[CLAY, document], k=1).invoke(asked) == [document]


def test_titles_and_headings_are_searched() -> None:
    plain, titled = (
        Document("It costs 180."),
        Document("It costs 90.", metadata={"title": "Oak", "heading": "Day"}),
    )
    for query in ("the oak", "per day"):
        assert BM25Retriever(documents=[plain, titled]).invoke(query) == [titled]


# Words and meaning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "qdrant"])  # Qdrant's client returns ids in the metadata
def test_hybrid_finds_by_words_and_by_meaning_and_each_text_once(
    kind: str, embeddings: SentenceEmbeddings, tmp_path: Path
) -> None:
    texts = ["The oven may be opened at 80 degrees.", "Serial number XK-4711.", "Cats sleep a lot."]
    documents = [Document(text, id=str(UUID(int=number))) for number, text in enumerate([*texts, *texts])]
    qdrant = qdrant_store(embeddings, path=tmp_path)
    store: VectorStore = InMemoryVectorStore(embeddings) if kind == "memory" else qdrant
    store.add_documents([*documents, Document("The kiln of others.", id=str(UUID(int=99)))])
    found = HybridRetriever(documents=documents, store=store, k=3)
    assert found.invoke("When can I open the kiln?")[0].page_content == texts[0]
    assert found.invoke("XK-4711")[0].page_content == texts[1]
    assert {one.page_content for one in found.invoke("pets")} == set(texts)
    assert len(found.invoke("pets", k=1)) == 1
    assert found.invoke("kiln", k=0) == []
    qdrant.client.close()


# The chain over stores of others -------------------------------------------------------------------


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    markdown_files(folder)
    return folder


def others(passages: list[Document], embeddings: Embeddings, path: Path) -> Iterator[tuple[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that package says that it is no longer kept
        from langchain_community.retrievers import BM25Retriever as CommunityBM25Retriever
    yield "community BM25", CommunityBM25Retriever.from_documents(passages)
    memory = InMemoryVectorStore(embeddings)
    memory.add_documents(passages)
    yield "InMemoryVectorStore", memory.as_retriever()
    store = qdrant_store(embeddings, path=path)
    store.add_documents(passages)
    yield "Qdrant", store.as_retriever()
    store.client.close()


async def test_the_chain_runs_on_retrievers_and_files_nobody_here_wrote(
    docs: Path, embeddings: SentenceEmbeddings, tmp_path: Path
) -> None:
    index = FolderIndex(docs)
    index.update()
    passages = index.documents[:24]
    asked = "How do I install it and send a first request?"
    for name, found in others(passages, embeddings, tmp_path / "qdrant"):
        retrieved = found.invoke(asked)
        chain = RetrievalCopyChain(found, QuotingModel())
        for answer in (chain.invoke(asked), await chain.ainvoke(asked)):
            assert retrieved, name
            assert answer.response_metadata["citations"], name
            assert_literal(answer, retrieved)


def test_every_citation_in_60_answers_is_literal(docs: Path) -> None:
    index = FolderIndex(docs)
    index.update()
    found = BM25Retriever(documents=index.documents, k=3)
    chain = RetrievalCopyChain(found, QuotingModel())
    rng = random.Random(6)
    num_citations = 0
    for _ in range(60):
        words = rng.choice(index.documents).page_content.split()
        asked = "What about " + " ".join(rng.choices(words, k=4)) + "?"
        answer = chain.invoke(asked)
        assert_literal(answer, found.invoke(asked))
        num_citations += len(answer.response_metadata["citations"])
    assert num_citations > 60


async def test_similar_answers_are_kept_on_disk(tmp_path: Path) -> None:
    for attempt in range(2):
        store = qdrant_store(FAKE, path=tmp_path, collection="answers")
        answers = SimilarAnswers(store)
        assert len(await answers.atexts(Situation(QUESTION, (), ()))) == attempt
        answers.add(QUESTION, "At eighty degrees.")
        store.client.close()


async def test_many_answers_are_kept_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = qdrant_store(FAKE, path=tmp_path)
    chain = RetrievalCopyChain(None, QuotingModel(), references=[SimilarAnswers(store)])
    questions = [f"{QUESTION} {number}" for number in range(24)]
    await chain.abatch(questions[:12])
    chain.batch(questions[12:])
    assert store.client.count("documents").count == 24
    assert not caplog.records
    store.client.close()


# Qdrant --------------------------------------------------------------------------------------------


def test_an_empty_qdrant_store_gives_a_plain_answer(tmp_path: Path) -> None:
    store = qdrant_store(FAKE, path=tmp_path)
    answer = RetrievalCopyChain(store.as_retriever(), QuotingModel()).invoke(QUESTION)
    assert answer.response_metadata["citations"] == []
    assert answer.text
    store.client.close()


def test_one_of_path_and_url_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"either path= .* or url="):
        qdrant_store(FAKE)
    with pytest.raises(ValueError, match=r"either path= .* or url="):
        qdrant_store(FAKE, path=tmp_path, url="http://127.0.0.1:6333")


# The client that cannot lock the folder leaves its lock file open.
@pytest.mark.filterwarnings("ignore:.*lock:pytest.PytestUnraisableExceptionWarning")
def test_a_folder_open_elsewhere_is_a_clear_error(tmp_path: Path) -> None:
    store = qdrant_store(FAKE, path=tmp_path)
    with pytest.raises(RuntimeError, match="already accessed by another instance"):
        qdrant_store(FAKE, path=tmp_path)
    store.client.close()
    gc.collect()


def test_a_server_that_is_down_is_a_clear_error() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=rf"{url} does not answer.*check that it runs"):
        qdrant_store(FAKE, url=url)


def test_a_store_that_goes_down_is_a_clear_error(tmp_path: Path) -> None:
    store = qdrant_store(FAKE, path=tmp_path)
    store.add_documents([CLAY], ids=["6f6d5bb4-3b57-4b4c-9a4c-8f5f7e3f0a11"])
    chain = RetrievalCopyChain(store.as_retriever(), QuotingModel())
    assert chain.invoke(QUESTION).response_metadata["citations"]
    store.client.close()
    with pytest.raises(RetrievalError, match="could not be asked for documents"):
        chain.invoke(QUESTION)


# The folder index ----------------------------------------------------------------------------------


class CountingStore(InMemoryVectorStore):
    """Counts what it is given."""

    num_added = 0

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        self.num_added += len(documents)
        return super().add_documents(documents, **kwargs)


def stored(store: VectorStore) -> set[str]:
    assert isinstance(store, InMemoryVectorStore)
    return set(store.store)


def test_only_what_changed_is_indexed_again(docs: Path, tmp_path: Path) -> None:
    state = tmp_path / "state" / "index.json"
    store = CountingStore(FAKE)
    first = FolderIndex(docs, state=state, store=store).update()
    num_files = len(list(docs.iterdir()))
    assert len(first.indexed) == num_files
    assert first.num_passages == store.num_added == len(stored(store))

    again = FolderIndex(docs, state=state, store=store).update()
    assert (again.indexed, len(again.unchanged)) == ([], num_files)
    assert store.num_added == first.num_passages

    (docs / "rich.md").unlink()
    (docs / "httpx.md").write_text("# HTTPX\n\nSomething new about timeouts.", "utf-8")
    (docs / "new").mkdir()
    (docs / "new" / "page.html").write_text("<title>T</title><p>Fresh.</p>", "utf-8")
    index = FolderIndex(docs, state=state, store=store)
    third = index.update()
    assert sorted(third.indexed) == ["httpx.md", "new/page.html"]
    assert third.removed == ["rich.md"]
    assert store.num_added == first.num_passages + 2
    assert stored(store) == {document.id for document in index.documents}
    assert not any(document.metadata["source"] == "rich.md" for document in index.documents)


def test_passages_stand_in_their_files_where_they_say(docs: Path) -> None:
    index = FolderIndex(docs)
    index.update()
    ids = [document.id for document in index.documents]
    assert len(ids) == len(set(ids)) > 20
    sources = {document.metadata["source"] for document in index.documents}
    texts = {source: load_file(docs / source)[0].page_content for source in sources}
    for document in index.documents:
        text = texts[document.metadata["source"]]
        start = document.metadata["start_index"]
        assert text[start : start + len(document.page_content)] == document.page_content


def test_unreadable_files_are_named_and_skipped(docs: Path) -> None:
    (docs / "image.md").write_bytes(b"\x89PNG\x00\x00")
    (docs / "broken.pdf").write_bytes(b"%PDF-1.4")
    os.symlink(docs / "nowhere", docs / "link.txt")
    (docs / ".hidden.md").write_text("secret", "utf-8")
    (docs / "data.xlsx").write_text("1,2", "utf-8")
    index = FolderIndex(docs)
    for _ in range(2):
        report = index.update()
        assert set(report.skipped) == {"image.md", "broken.pdf", "link.txt"}
        assert "not text" in report.skipped["image.md"]
    assert not {"image.md", ".hidden.md", "data.xlsx"} & {d.metadata["source"] for d in index.documents}


def test_passages_keep_to_a_section_and_know_their_headings(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# Hall\n\nOpen.\n\n## Rooms\n\n### Oak\n\n" + "Oak it is. " * 100, "utf-8"
    )
    index = FolderIndex(tmp_path, store=(store := InMemoryVectorStore(FAKE)))
    index.update()
    first, *others = index.documents
    assert first.page_content == "# Hall\n\nOpen."
    assert {(one.metadata["title"], one.metadata["heading"]) for one in others} == {("Hall", "Rooms > Oak")}
    assert len(others) > 1
    stored = store.get_by_ids([str(others[1].id)])[0].page_content
    assert stored == f"# Hall > Rooms > Oak\n{others[1].page_content}"


UNSEEN = """
import os, sys
from pathlib import Path
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from retrieval_copy import FolderIndex

if os.getuid() == 0:
    os.setuid(65534)  # who may read anything is denied nothing
folder, store = Path(sys.argv[1], "docs"), InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
(folder / "inner").mkdir(parents=True)
for name in ("a.md", "inner/b.md"):
    (folder / name).write_text(name)
state = folder.parent / "state"
FolderIndex(folder, state=state, store=store).update()

def unseen(expected):
    index = FolderIndex(folder, state=state, store=store)
    report = index.update()
    assert not report.removed and set(report.skipped) == {expected}, report
    assert "before is kept" in report.skipped[expected], report
    assert len(index.documents) == len(store.store) == 2, report

for mode, name in ((0, "inner"), (0o444, "inner/b.md")):
    (folder / "inner").chmod(mode)
    unseen(name)
    (folder / "inner").chmod(0o777)
(folder / "a.md").chmod(0)
os.utime(folder / "a.md", (1, 1))
unseen("a.md")
(folder / "a.md").chmod(0o666)
FolderIndex(folder, state=state, store=store).update()
folder.chmod(0)
unseen(".")
folder.chmod(0o777)
index = FolderIndex(folder, state=state, store=store)
folder.rename(folder.with_name("away"))
assert not index.update().removed and len(index.documents) == 2
folder.mkdir()
unseen(".")
folder.rmdir()
folder.with_name("away").rename(folder)
(folder / "inner" / "b.md").unlink()
report = FolderIndex(folder, state=state, store=store).update()
assert report.removed == ["inner/b.md"] and not report.skipped and len(store.store) == 1, report
"""


def test_what_cannot_be_seen_for_a_while_is_not_removed() -> None:
    with TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o777)
        command = [sys.executable, "-c", UNSEEN, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_store_that_does_not_delete_is_an_error(docs: Path) -> None:
    class Keeping(CountingStore):
        def delete(self, *args: Any, **kwargs: Any) -> Any:
            return False

    index = FolderIndex(docs, store=Keeping(FAKE))
    num_passages = index.update().num_passages
    (docs / "rich.md").unlink()
    with pytest.raises(RuntimeError, match=r"does not delete the passages of rich\.md"):
        index.update()
    assert len(index.documents) == num_passages


def test_a_path_may_begin_at_home(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(docs.parent))
    FolderIndex("~/docs", state="~/state.json").update()
    assert (docs.parent / "state.json").is_file()
    with pytest.raises(NotADirectoryError, match="~nobody_of_that_name/docs is not a folder"):
        FolderIndex("~nobody_of_that_name/docs")


def test_repeated_text_is_found_where_each_part_of_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("This is a test, please dont be mad at me. " * 60, "utf-8")
    index = FolderIndex(tmp_path)
    index.update()
    starts = [one.metadata["start_index"] for one in index.documents]
    assert starts == sorted(set(starts))


def test_names_that_are_not_utf8_do_not_stop_the_index(docs: Path, tmp_path: Path) -> None:
    num_files = len(list(docs.iterdir()))
    Path(os.fsdecode(os.fsencode(docs) + b"/of\xe9n.md")).write_text("The first kiln is open.", "utf-8")
    folder = Path(os.fsdecode(os.fsencode(docs) + b"/\xff"))
    folder.mkdir()
    Path(folder, "x.md").write_text("The second kiln is open.", "utf-8")
    Path(os.fsdecode(os.fsencode(docs) + b"/\xfe.pdf")).write_bytes(b"%PDF-1.4")
    state = tmp_path / "index.json"
    store = qdrant_store(FAKE, path=tmp_path / "qdrant")
    report = FolderIndex(docs, state=state, store=store).update()
    assert len(report.indexed) == num_files + 2
    assert {"of\\xe9n.md", "\\xff/x.md"} < set(report.indexed)
    assert set(report.skipped) == {"\\xfe.pdf"}
    index = FolderIndex(docs, state=state, store=store)
    assert (len(index.update().unchanged), index.update().indexed) == (num_files + 2, [])
    (found,) = BM25Retriever(documents=index.documents, k=1).invoke("second kiln open")
    assert found.metadata["source"] == "\\xff/x.md"
    store.client.close()
    inner = FolderIndex(folder, state=state)
    assert inner.update().indexed == FolderIndex(folder, state=state).update().unchanged == ["x.md"]


def test_a_damaged_file_is_named_and_the_rest_of_it_is_there(
    docs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (docs / "ofen.md").write_bytes("Der Ofen wird geöffnet, wenn er kühl ist, sagt René".encode()[:-1])
    index = FolderIndex(docs)
    index.update()
    (found,) = [document for document in index.documents if document.metadata["source"] == "ofen.md"]
    assert found.page_content == "Der Ofen wird geöffnet, wenn er kühl ist, sagt Ren\ufffd"
    assert [record.getMessage() for record in caplog.records] == [
        "ofen.md has bytes that are not UTF-8; they were replaced, the rest is read"
    ]


def test_a_store_that_lost_its_passages_is_filled_again(docs: Path, tmp_path: Path) -> None:
    state = tmp_path / "index.json"
    FolderIndex(docs, state=state, store=CountingStore(FAKE)).update()
    empty = CountingStore(FAKE)
    report = FolderIndex(docs, state=state, store=empty).update()
    assert report.num_passages == empty.num_added > 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', "{HEADER}\n3", "{HEADER}\n{}"])
def test_a_broken_state_is_begun_anew(docs: Path, tmp_path: Path, content: str) -> None:
    state = tmp_path / "index.json"
    header = json.dumps({"format": FORMAT, "folder": str(docs.resolve())})
    state.write_text(content.replace("{HEADER}", header), "utf-8")
    index = FolderIndex(docs, state=state)
    assert index.documents == []
    assert index.update().indexed
    assert len(state.read_text("utf-8").splitlines()) == 1 + len(list(docs.iterdir()))


def test_what_is_done_is_kept_when_the_store_fails_midway(docs: Path, tmp_path: Path) -> None:
    (docs / "a_first.md").write_text("\n\n".join(f"Note {number}. " * 60 for number in range(300)), "utf-8")

    class Failing(CountingStore):
        def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
            if self.num_added > 256:
                raise ConnectionError("full")
            return super().add_documents(documents, **kwargs)

    state = tmp_path / "index.json"
    store = Failing(FAKE)
    with pytest.raises(ConnectionError):
        FolderIndex(docs, state=state, store=store).update()
    healthy = CountingStore(FAKE)
    healthy.store = store.store
    report = FolderIndex(docs, state=state, store=healthy).update()
    assert len(report.unchanged) == 1
    assert stored(healthy) == {d.id for d in FolderIndex(docs, state=state, store=healthy).documents}


def test_a_folder_that_moved_is_indexed_under_its_new_place(docs: Path, tmp_path: Path) -> None:
    state = tmp_path / "index.json"
    FolderIndex(docs, state=state).update()
    moved = shutil.copytree(docs, tmp_path / "moved")
    assert FolderIndex(moved, state=state).update().indexed


def test_progress_is_shown_where_wanted(docs: Path) -> None:
    console = Console(record=True, width=80, force_terminal=True, file=StringIO())
    FolderIndex(docs).update(console=console)
    assert "Indexing" in console.export_text()


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        FolderIndex(tmp_path / "missing")


def test_one_bad_file_never_stops_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "docs"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "good.md").write_text("# Kilns\n\nThe kiln is opened at eighty degrees.", "utf-8")
    (folder / "sjis.txt").write_text("窯は八十度まで冷めてから開けます。", "shift_jis")
    (folder / "inner" / "loop").symlink_to(folder)
    (folder / "self.txt").symlink_to(folder / "self.txt")
    (folder / "away.txt").symlink_to(folder / "missing.txt")
    os.mkfifo(folder / "pipe.txt")
    (folder / "empty.txt").touch()
    (folder / "blank.md").write_text(" \n\n", "utf-8")
    (folder / "program.txt").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 20)
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7\n1 0 obj\n<< /Type")
    (folder / "broken.docx").write_bytes(b"PK\x03\x04nothing")
    (folder / "~$open.docx").write_bytes(b"lock")
    (folder / "broken.ipynb").write_text('{"cells": [', "utf-8")
    (folder / "deep.html").write_text("<b>" * 3_000 + "deep", "utf-8")
    (folder / "line.txt").write_text("A1b2" * 250_000, "utf-8")
    (folder / "folder.md").mkdir()
    with (folder / "huge.log").open("wb") as huge:
        huge.truncate(3_000_000_000)
    index = FolderIndex(folder, state=tmp_path / "index")
    report = index.update()
    assert set(report.indexed) == {"inner/good.md", "sjis.txt", "deep.html", "line.txt"}
    assert set(report.skipped) == {
        *("self.txt", "away.txt", "pipe.txt", "empty.txt", "blank.md", "program.txt"),
        *("broken.pdf", "broken.docx", "broken.ipynb", "huge.log"),
    }
    assert all(report.skipped.values())
    assert len(FolderIndex(folder, state=tmp_path / "index").update().unchanged) == 4
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_what_lacks_a_package_is_read_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    shutil.copy(Path(__file__).parents[3] / "notebooks" / "05_retrieval.ipynb", folder)
    index = FolderIndex(folder)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "nbformat", None)
        (reason,) = index.update().skipped.values()
        assert "pip install '.[documents]'" in reason
        assert "pip install '.[documents]'" in caplog.text
    assert index.update().indexed == ["05_retrieval.ipynb"]


def test_files_are_stored_in_batches(tmp_path: Path) -> None:
    class Batches(CountingStore):
        num_calls = 0

        def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
            self.num_calls += 1
            return super().add_documents(documents, **kwargs)

    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.txt").write_text(f"Pot {number} was fired on day {number}.", "utf-8")
    store = Batches(FAKE)
    assert len(FolderIndex(folder, store=store).update().indexed) == 300 == store.num_added
    assert store.num_calls == 2


def test_text_without_spaces_is_split_at_once_and_stays_where_it_stands(tmp_path: Path) -> None:
    chinese = "窑炉冷却到八十度时可以打开，发光时绝对不能打开。" * 200
    for text in ("QmFzZTY0" * 40_000, chinese):
        (tmp_path / "long.txt").write_text(text, "utf-8")
        index = FolderIndex(tmp_path)
        index.update()
        for document in index.documents:
            start = document.metadata["start_index"]
            assert text[start : start + len(document.page_content)] == document.page_content
            assert text is not chinese or document.page_content[-1] == "。"


TEN_THOUSAND = """
import resource, sys
from pathlib import Path
from retrieval_copy import BM25Retriever, FolderIndex
folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
state = folder.parent / "index"
report = FolderIndex(folder, state=state).update()
assert len(report.indexed) == 10_000, report.skipped
index = FolderIndex(folder, state=state)
assert len(index.update().unchanged) == 10_000
found = BM25Retriever(documents=index.documents, k=1).invoke("Which note names the number 4711?")
assert found[0].metadata["source"] == "4711.txt"
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_ten_thousand_files_take_the_memory_that_is_stated(tmp_path: Path) -> None:
    """Reading, keeping, reading the state again and a BM25 index over it, in a process of its own."""
    folder = tmp_path / "docs"
    folder.mkdir()
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(20_000)]
    for number in range(10_000):
        lines = [" ".join(rng.choices(words, k=14)) + "." for _ in range(55)]
        (folder / f"{number}.txt").write_text(f"Note {number}.\n\n" + "\n".join(lines), "utf-8")
    done = subprocess.run(
        [sys.executable, "-c", TEN_THOUSAND, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 700


def test_what_vanishes_between_listing_and_reading_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("the kiln", "utf-8")
    (tmp_path / "b.txt").write_text("the glaze", "utf-8")
    index = FolderIndex(tmp_path)
    index.update()
    stat = Path.stat

    def vanished(path: Path, **options: Any) -> os.stat_result:
        if path.name == "a.txt":
            raise OSError(116, "Stale file handle")
        return stat(path, **options)

    with monkeypatch.context() as share:
        share.setattr(Path, "stat", vanished)
        report = index.update()
    assert "Stale file handle; what was read of it before is kept" in report.skipped["a.txt"]
    assert sorted(one.page_content for one in index.documents) == ["the glaze", "the kiln"]
    assert index.update().indexed == ["a.txt"]


# Embeddings ----------------------------------------------------------------------------------------


def test_what_cannot_be_encoded_is_embedded_all_the_same(embeddings: SentenceEmbeddings) -> None:
    odd, plain = embeddings.embed_documents(["the \udcff kiln", "the \ufffd kiln"])
    assert odd == pytest.approx(plain, abs=1e-6)


def test_sentences_of_like_meaning_lie_close(embeddings: SentenceEmbeddings) -> None:
    near, far = embeddings.embed_documents(["When can I open the oven?", "Prices fell last year."])
    query = embeddings.embed_query(QUESTION)
    dot = [sum(a * b for a, b in zip(query, other, strict=True)) for other in (near, far)]
    assert dot[0] > dot[1] + 0.2
    assert abs(sum(value * value for value in query) - 1) < 1e-5
    assert embeddings.embed_documents([]) == []


def test_sentences_are_ranked_and_judged_by_meaning_too(embeddings: SentenceEmbeddings) -> None:
    passages = [
        "# Rates\nThe yearly subscription is 210 pounds for adults. Families pay 380 pounds.",
        "# Rooms\nThe whole library costs 60 pounds to hire. The hall costs 200 pounds.",
        "# Squad\nThe trainer, Tomas Varga, expects everybody ten minutes early.",
    ]
    found = HybridRetriever(documents=[Document("x", id="1")], store=InMemoryVectorStore(embeddings))
    sentences = [one for passage in passages for one in placed_sentences(passage)]
    contexts = [text for one in sentences for text in one.contexts]
    for question, expected in (
        ("How much does it cost for a whole family?", "Families pay 380 pounds."),
        ("Who coaches the young ones?", "The trainer, Tomas Varga, expects everybody ten minutes early."),
    ):
        likeness = found.likeness(question, contexts)
        asked = Question(question, likeness)
        assert max(filter(lambda one: one.may_answer, sentences), key=asked.score).text == expected
        assert not any(map(Question(question).is_answered_by, sentences[-1:]))
    for question in ("How much does a massage cost?", "Who is the gardener?", "When does the pool open?"):
        asked = Question(question, found.likeness(question, contexts))
        assert not any(map(asked.is_answered_by, sentences))


class Shifted(Embeddings):
    """An encoder with the order of another, but cosines between 0.8 and 1, as those of some others."""

    def __init__(self, inner: Embeddings) -> None:
        self.inner, self.num_texts = inner, 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.num_texts += len(texts)
        return [[2.0, *vector] for vector in self.inner.embed_documents(texts)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def test_likeness_has_the_same_scale_for_every_encoder(embeddings: SentenceEmbeddings) -> None:
    documents = [Document("x", id="1")]
    texts = ["Families pay 380 pounds.", "The trainer comes early."]
    question = "How much does it cost for a family?"
    shifted = Shifted(embeddings)
    found = HybridRetriever(documents=documents, store=InMemoryVectorStore(shifted))
    known = HybridRetriever(documents=documents, store=InMemoryVectorStore(embeddings))
    likeness = found.likeness(question, texts)
    assert likeness == pytest.approx(known.likeness(question, texts), abs=1e-3)
    assert likeness[texts[0]] > 0.7
    assert likeness[texts[1]] < 0.4
    num_texts = shifted.num_texts
    found.likeness("Who comes early?", texts)
    assert shifted.num_texts == num_texts + 1, "sentences are embedded once"


def test_an_encoder_that_knows_no_meanings_judges_nothing() -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=256))
    found = HybridRetriever(documents=[Document("x", id="1")], store=store)
    assert found.likeness("How much does it cost?", ["It costs 3 euros."]) == {}


def test_the_first_by_words_comes_before_the_last_of_both_searches() -> None:
    class Backwards(InMemoryVectorStore):
        def similarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
            return [Document("", id=str(number)) for number in range(k - 1, 0, -1)]

    documents = [Document("kiln" + " clay" * number, id=str(number)) for number in range(20)]
    store = Backwards(DeterministicFakeEmbedding(size=8))
    found = HybridRetriever(documents=documents, store=store, k=8).invoke("kiln")
    assert "0" in [one.id for one in found]
