"""The command behind ``make rag``, on the default model."""

from __future__ import annotations

import json
import os
import re
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

from local_backend import ChatLocal
from retrieval_copy.cli import main
from tests.servers import free_port


@pytest.fixture(autouse=True)
def _loaded_once(default_copying: ChatLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatLocal, "from_pretrained", classmethod(lambda cls, *_, **__: default_copying))
    monkeypatch.setattr(ChatLocal, "close", lambda self: None)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "kilns.md").write_text("# Kilns\n\nThe kiln is opened at eighty degrees.", "utf-8")
    (folder / "rubbish.md").write_bytes(b"\x00\x01\x02")
    return folder


def run(*arguments: str | Path) -> int:
    return main(["--max-tokens", "12", *map(str, arguments)])


@pytest.mark.parametrize("store", ["qdrant", "bm25"])
def test_it_indexes_once_and_answers(
    store: str, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (docs, "When is the kiln opened?", "--store", store, "--index", tmp_path / "index")
    assert run(*asked) == 0
    first = capsys.readouterr().out
    assert "1 passages; files: 1 indexed, 0 unchanged, 0 removed, 1 skipped" in first
    assert "skipped rubbish.md: the bytes are not text" in first
    assert "tokens each" in first
    assert run(*asked) == 0
    assert "0 indexed, 1 unchanged" in capsys.readouterr().out


def test_a_script_gets_json_alone(docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (docs, "When is the kiln opened?", "--store", "bm25", "--index", tmp_path / "index", "--json")
    assert run(*asked) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "eighty degrees" in found["answer"]
    assert found["retrieval"]["supported"] is True
    assert [citation["document"] for citation in found["citations"]] == [0]
    assert "1 indexed" in said.err
    with pytest.raises(SystemExit, match="2"):
        run(docs, "--json")


def test_every_mark_of_a_citation_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``make rag`` asks by default: the marks and the list below them agree and name files."""
    notes = Path(__file__).parents[2] / "examples" / "pottery"
    asked = [str(notes), "Who may open the kiln?", "--index", str(tmp_path / "index"), "--max-tokens", "48"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    marks = {int(mark) for mark in re.findall(r"\[(\d+)\]", shown)}
    assert marks == set(range(1, len(marks) + 1))
    assert bool(marks) == any(path.name in shown for path in notes.iterdir())


@pytest.mark.parametrize("store", ["qdrant", "bm25"])
def test_in_doubt_the_nearest_passages_stand_in_place_of_an_answer(
    store: str, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(docs, "Who painted the kiln?", "--store", store, "--index", tmp_path / "index") == 0
    shown = capsys.readouterr().out
    assert shown.count("for sure; the nearest passages:\nkilns.md\n# Kilns\n") == 1
    assert "[1]" not in shown


def test_by_default_the_index_lies_in_the_cache_folder_of_the_user(
    docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(docs, "When?", "--store", "bm25") == 0
    assert list((tmp_path / "cache" / "langchain-parallel-decoding" / "rag").glob("*/bm25.json"))


@pytest.mark.parametrize("store", ["qdrant", "bm25"])
def test_what_is_wrong_is_said_in_one_line(
    store: str, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = ("--store", store, "--index", tmp_path / "index")
    assert run(docs / "missing", "When?", *index) == 1
    assert "NotADirectoryError" in capsys.readouterr().out
    assert run(docs, " ", *index) == 1
    assert "the question is empty" in capsys.readouterr().out


def test_a_folder_without_a_readable_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "sheet.xlsx").write_bytes(b"PK")
    assert run(tmp_path / "docs", "When?", "--store", "bm25", "--index", tmp_path / "index") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "has no file that can be read, of .txt, " in said


def test_many_skipped_files_are_counted(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(30):
        (docs / f"{number}.txt").touch()
    assert run(docs, "When is the kiln opened?", "--store", "bm25", "--index", tmp_path / "index") == 0
    shown = capsys.readouterr().out
    assert shown.count(": it is empty") == 10
    assert "skipped 21 others" in shown


def test_without_a_question_it_answers_what_it_is_piped(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("When is the kiln opened?\n1\n\nq\nWhy?\n"))
    assert run(docs, "--store", "bm25", "--min-citation-tokens", "3", "--index", tmp_path / "index") == 0
    shown = capsys.readouterr().out
    assert "> When is the kiln opened?\n" in shown
    assert "[1] kilns.md: " in shown
    assert ">>>The kiln is opened at eighty degrees.<<<" in shown
    assert "Why?" not in shown
    assert "\x1b" not in shown


def test_names_that_are_not_utf8_are_shown_with_their_bytes(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.fsdecode(os.fsencode(docs) + b"/\xff"))
    index = ("--store", "bm25", "--index", tmp_path / "index")
    assert run(folder, "When?", *index) == 1
    assert "/\\udcffisnotafolder" in "".join(capsys.readouterr().out.split())  # lines wrap anywhere
    folder.mkdir()
    (folder / "broken.pdf").write_bytes(b"%PDF")
    assert run(docs, "When is the kiln opened?", *index) == 0
    assert "skipped \\xff/broken.pdf: not a readable PDF" in capsys.readouterr().out


def test_a_server_that_is_down_is_said(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert run(docs, "When?", "--url", url, "--index", tmp_path / "index") == 1
    assert "check that it runs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_that_lacks_characters_shows_others(
    encoding: str, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "kilns.md").write_text("# Öfen\n\nThe kiln – 窯 – is opened at eighty degrees ☕.", "utf-8")
    shown = TextIOWrapper(BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"When is the kiln opened \xff?\n1\n"), "utf-8"))
    assert run(docs, "--store", "bm25", "--index", tmp_path / "index") == 0
    shown.flush()
    assert b" is opened at eighty degrees<<< ?." in shown.buffer.getvalue()  # type: ignore[attr-defined]  # a BytesIO
