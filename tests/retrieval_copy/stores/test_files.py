"""Formats: real files of other people, and what no reader can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents.base import Blob
from matplotlib.figure import Figure

from retrieval_copy.stores.files import (
    PARSERS,
    HtmlParser,
    TextParser,
    UnreadableFileError,
    load_file,
    printable,
)
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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"])
def test_text_is_decoded(encoding: str) -> None:
    (document,) = TextParser().lazy_parse(Blob.from_data("# Öfen – café\r\n\r\nheiß".encode(encoding)))
    assert document.page_content == "# Öfen – café\n\nheiß"
    assert document.metadata["title"] == "Öfen – café"


UMLAUTS = (
    "Der Ofen wird erst geöffnet, wenn er überall unter 80\u00a0°C abgekühlt ist – niemals früher. ".encode()
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (UMLAUTS + b"\xc3", "früher. \ufffd"),
        (UMLAUTS[:20] + b"\xff" + UMLAUTS[20:], "erst g\ufffde"),
        (UMLAUTS[:20] + b"\x81" + UMLAUTS[20:], "erst g\ufffde"),
        (UMLAUTS + b"it\x92s", "früher. it\ufffds"),
        (b"\xef\xbb\xbf" + UMLAUTS + b"\xf6\xf6\xf6", "früher. \ufffd"),
        (b"All in ASCII \xff but one", "ASCII \ufffd but"),
        (b"All in ASCII, and a \x81 in it", "a \ufffd in"),
        (b"The price is 5 \xe2\x82", "is 5 \ufffd"),
        (b"cut: \xc3", "cut: \ufffd"),
        ("geöffnet".encode("utf-16") + b"\x00", "geöffnet\ufffd"),
    ],
)
@pytest.mark.parametrize("ending", [".md", ".html"])
def test_damaged_bytes_alone_are_replaced_with_a_warning_that_names_the_file(
    tmp_path: Path, content: bytes, expected: str, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"ofen{ending}").write_bytes(content)
    (document,) = load_file(tmp_path / f"ofen{ending}")
    assert expected in document.page_content
    (record,) = caplog.records
    assert f"ofen{ending} has bytes that are not UTF-" in record.getMessage()


@settings(max_examples=100)
@given(st.data())
def test_one_damaged_byte_leaves_all_others_as_they_are(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(UMLAUTS)))
    damage = data.draw(st.integers(0x80, 0xFF)).to_bytes(1, "little")
    content = UMLAUTS[:place] + damage + UMLAUTS[place + data.draw(st.integers(0, 1)) :]
    (document,) = TextParser().lazy_parse(Blob.from_data(content))
    assert document.page_content == content.decode("utf-8", "replace")


@pytest.mark.parametrize(
    "text",
    ["Café", "Der Ofen ist geöffnet.", "« Là, l’été » – 5 €", "it’s", "naïve, déjà vu", "ÅNGSTRÖM ÄR SVÅRT"],
)
def test_windows_1252_stays_what_it_is(text: str, caplog: pytest.LogCaptureFixture) -> None:
    for content in (text.encode("cp1252"), f"# In it\n\n{text} and more".encode("cp1252")):
        (document,) = TextParser().lazy_parse(Blob.from_data(content))
        assert text in document.page_content
    assert not caplog.records


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ("windows-1251", "cp1251"),
        ("shift_jis", "shift_jis"),
        ("iso-8859-1", "cp1252"),
        ("UTF-8", "utf-8"),
        ("utf-16", "utf-8"),
        ("hex", "utf-8"),
        ("nothing", "cp1252"),
        ("idna", "utf-8"),
    ],
)
def test_html_is_decoded_as_it_declares(declared: str, encoding: str) -> None:
    text = {"cp1251": "Печь открывают", "shift_jis": "窯を開ける", "cp1252": "’s geöffnet"}.get(
        encoding, "窑 geöffnet"
    )
    page = f'<html><head><meta charset="{declared}"></head><body><p>{text}</p></body></html>'
    (document,) = HtmlParser().lazy_parse(Blob.from_data(page.encode(encoding)))
    assert document.page_content == text


def test_a_name_that_is_not_utf8_is_shown_with_its_bytes(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/of\xe9n.md"))
    path.write_text("The kiln.", "utf-8")
    (document,) = load_file(path)
    assert document.metadata["source"] == f"{tmp_path}/of\\xe9n.md"
    assert printable(Path("öfen/窑.md")) == "öfen/窑.md"


@given(st.sampled_from(sorted(PARSERS)), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(ending: str, content: bytes) -> None:
    try:
        documents = list(PARSERS[ending].lazy_parse(Blob.from_data(content)))
    except UnreadableFileError:
        return
    for document in documents:
        assert isinstance(document.page_content, str)
