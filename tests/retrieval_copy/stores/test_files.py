"""Formats: real files of other people, and what no reader can read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents.base import Blob
from matplotlib.figure import Figure

from retrieval_copy.stores.files import PARSERS, HtmlParser, TextParser, UnreadableFileError, load_file
from tests.retrieval_copy.installed import SITE_PACKAGES, html_files, markdown_files


def test_markdown_is_read_as_it_stands(tmp_path: Path) -> None:
    paths = markdown_files(tmp_path)
    assert len(paths) >= 5
    for path in paths:
        (document,) = load_file(path)
        assert document.page_content == path.read_text("utf-8")
        assert document.metadata["source"] == str(path)


def test_html_of_installed_packages_is_read_as_text() -> None:
    pages = html_files()
    assert pages
    num_read = 0
    for path in pages:
        try:
            (document,) = load_file(path, source=path.relative_to(SITE_PACKAGES).as_posix())
        except UnreadableFileError:  # a template without text
            continue
        num_read += 1
        assert "<div" not in document.page_content
        assert "function(" not in document.page_content
    assert num_read


def test_html_gives_one_line_a_block_and_no_scripts() -> None:
    page = """<!doctype html><html><head><title>On
      kilns</title><style>p {color: red}</style></head><body><h1>Opening</h1><!-- hidden -->
      <p>Open   it at <b>eighty</b>
      degrees.</p><ul><li>One</li><li>Two</li></ul><pre>a  b
 c</pre><script>var x = "<p>no</p>";</script><p>caf&eacute;</p></body></html>"""
    (document,) = HtmlParser().lazy_parse(Blob.from_data(page))
    assert document.metadata["title"] == "On kilns"
    lines = [line for line in document.page_content.split("\n") if line]
    assert lines == ["Opening", "Open it at eighty degrees.", "One", "Two", "a  b", "c", "café"]


def test_xhtml_and_broken_html_are_read() -> None:
    for page in ('<?xml version="1.0"?><html><body><p>fine</p></body></html>', "<p>fine<div><b>"):
        (document,) = HtmlParser().lazy_parse(Blob.from_data(page))
        assert document.page_content == "fine"


def test_a_pdf_gives_one_document_a_page(tmp_path: Path) -> None:
    figure = Figure()
    figure.text(0.1, 0.5, "The kiln is opened at eighty degrees")
    path = tmp_path / "kiln.PDF"
    figure.savefig(path, format="pdf", metadata={"Title": "Kilns"})
    (document,) = load_file(path)
    assert document.page_content == "The kiln is opened at eighty degrees"
    assert document.metadata == {"source": str(path), "title": "Kilns", "page": 1}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.md", b"\x89PNG\x00\x01\x02", "not text"),
        ("a.txt", b" \n ", "holds no text"),
        ("a.pdf", b"%PDF-1.7 nonsense", "not a readable PDF"),
        ("a.pdf", b"", "not a readable PDF"),
        ("a.html", b"<html></html>", "holds no text"),
        ("a.exe", b"text", "none of"),
        ("a", b"text", "no ending"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableFileError, match=reason):
        load_file(tmp_path / name)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="No such file"):
        load_file(tmp_path / "a.md")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_text_is_decoded(encoding: str) -> None:
    (document,) = TextParser().lazy_parse(Blob.from_data("# Öfen – café\r\n\r\nheiß".encode(encoding)))
    assert document.page_content == "# Öfen – café\n\nheiß"
    assert document.metadata["title"] == "Öfen – café"


@given(st.sampled_from(sorted(PARSERS)), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(ending: str, content: bytes) -> None:
    try:
        documents = list(PARSERS[ending].lazy_parse(Blob.from_data(content)))
    except UnreadableFileError:
        return
    for document in documents:
        assert isinstance(document.page_content, str)
