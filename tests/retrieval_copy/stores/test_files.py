"""Formats: real files of other people, and what no reader can read."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import docx
import nbformat
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.documents.base import Blob
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from pypdf import PdfWriter
from pypdf.generic import NameObject

from retrieval_copy.stores.files import (
    MAX_FILE_BYTES,
    PARSERS,
    HtmlParser,
    TextParser,
    UnreadableFileError,
    load_file,
    printable,
)
from tests.retrieval_copy.installed import SITE_PACKAGES, html_files, markdown_files


def test_markdown_is_read_as_it_stands_but_for_tables(tmp_path: Path) -> None:
    paths = markdown_files(tmp_path)
    assert len(paths) >= 5
    for path in paths:
        (document,) = load_file(path)
        text, read = path.read_text("utf-8").split("\n"), document.page_content.split("\n")
        tables = [line for line in text if line.startswith("|")]
        assert [line for line in text if line not in tables and line] == [
            line for line in read if line in text and line
        ]
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
    assert lines == ["Opening", "Open it at eighty degrees.", "One", "Two", "a  b", " c", "café"]


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
        ("a.pdf", b"%PDF-1.7\nnonsense", "not a readable PDF"),
        ("a.pdf", b"GIF89a", "not a readable PDF"),
        ("a.pdf", b"", "it is empty"),
        ("a.docx", b"PK\x03\x04", "not a readable DOCX file"),
        ("a.docx", b"text", "not a readable DOCX file"),
        ("a.ipynb", b"{}", "not a readable IPYNB file"),
        ("a.ipynb", b'{"cells": 3}', "not a readable IPYNB file"),
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


PICTURE = bytes.fromhex(  # a black pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c636000000002000148afa4710000000049454e44ae426082"
)

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


BEGINNINGS = {".pdf": b"%PDF-1.4\n", ".docx": b"PK\x03\x04", ".ipynb": b'{"nbformat": 4, "cells": ['}


@given(st.sampled_from(sorted(PARSERS)), st.booleans(), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(folder: Path, ending: str, is_begun: bool, content: bytes) -> None:
    path = folder / f"any{ending}"
    path.write_bytes(BEGINNINGS.get(ending, b"") * is_begun + content)
    try:
        documents = load_file(path)
    except UnreadableFileError:
        return
    for document in documents:
        assert document.page_content.strip()


# PDF, Word files and notebooks ---------------------------------------------------------------------


def pdf(path: Path, *pages: str) -> Path:
    with PdfPages(path) as written:
        for text in pages:
            figure = Figure()
            if text:
                figure.text(0.1, 0.5, text)
            written.savefig(figure)
    return path


def test_pages_are_counted_as_a_reader_counts_them(tmp_path: Path) -> None:
    path = pdf(tmp_path / "kiln.pdf", "First things", "", "Third things")
    assert [(page.metadata["page"], page.page_content) for page in load_file(path)] == [
        (1, "First things"),
        (3, "Third things"),
    ]


def test_a_broken_page_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = PdfWriter(
        clone_from=pdf(tmp_path / "whole.pdf", "First things", "Second things", "Third things")
    )
    writer.pages[1]["/Contents"].get_object()[NameObject("/Filter")] = NameObject("/Nonsense")
    writer.write(tmp_path / "broken.pdf")
    assert [page.metadata["page"] for page in load_file(tmp_path / "broken.pdf")] == [1, 3]
    assert "page 2 of" in caplog.records[-1].getMessage()


def test_a_pdf_that_is_protected_against_changes_is_read(tmp_path: Path) -> None:
    for password, algorithm in (("", "AES-256"), ("", "RC4-128"), ("secret", "AES-256")):
        writer = PdfWriter(clone_from=pdf(tmp_path / "whole.pdf", "Protected things"))
        writer.encrypt(password, "owner", algorithm=algorithm)
        writer.write(tmp_path / "protected.pdf")
        if password:
            with pytest.raises(UnreadableFileError, match="has not been decrypted"):
                load_file(tmp_path / "protected.pdf")
        else:
            assert load_file(tmp_path / "protected.pdf")[0].page_content == "Protected things"


def test_word_files_give_paragraphs_lists_tables_and_a_title(tmp_path: Path) -> None:
    word = docx.Document()
    word.add_heading("On kilns – für alle", 0)
    word.add_paragraph("The kiln is ").add_run("opened").bold = True
    word.add_paragraph("Wear gloves.", style="List Bullet")
    table = word.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "cone", "eighty degrees"
    word.add_picture(io.BytesIO(PICTURE))
    word.save(str(tmp_path / "kiln.docx"))
    (document,) = load_file(tmp_path / "kiln.docx", source="kiln.docx")
    lines = [line for line in document.page_content.split("\n") if line]
    assert lines == ["On kilns – für alle", "The kiln is opened", "Wear gloves.", "cone | eighty degrees"]
    assert document.metadata == {"source": "kiln.docx", "title": "On kilns – für alle"}


def test_a_word_file_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.docx", "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("word/document.xml", b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(UnreadableFileError, match="more than"):
        load_file(tmp_path / "bomb.docx")


@pytest.mark.parametrize("version", [3, 4])
def test_notebooks_give_their_cells_and_what_they_print(tmp_path: Path, version: int) -> None:
    form: Any = nbformat.v3 if version == 3 else nbformat.v4
    output = form.new_output("stream")
    output["text"] = "opened at 80\n"
    code = form.new_code_cell("print(kiln.open())", outputs=[output])
    text = form.new_text_cell("markdown", "# Kilns") if version == 3 else form.new_markdown_cell("# Kilns")
    cells = [text, code]
    notebook = (
        form.new_notebook(worksheets=[form.new_worksheet(cells=cells)])
        if version == 3
        else form.new_notebook(cells=cells)
    )
    path = tmp_path / "kiln.ipynb"
    path.write_text(json.dumps(notebook), "utf-8")
    (document,) = load_file(path, source="kiln.ipynb")
    assert document.page_content == "# Kilns\n\nprint(kiln.open())\n\nopened at 80"
    assert document.metadata == {"source": "kiln.ipynb", "title": "Kilns"}


def test_the_notebooks_of_this_project_are_read() -> None:
    for path in sorted((Path(__file__).parents[3] / "notebooks").glob("*.ipynb")):
        (document,) = load_file(path)
        assert document.metadata["title"] in document.page_content


# What must not stop or flood anybody ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "package"), [(".pdf", "pypdf"), (".docx", "mammoth"), (".ipynb", "nbformat")]
)
def test_a_missing_package_is_named_with_the_command(
    tmp_path: Path, ending: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"a{ending}").write_bytes(b"text")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UnreadableFileError, match=rf"package {package}: pip install '\.\[documents\]'"
    ) as error:
        load_file(tmp_path / f"a{ending}")
    assert error.value.may_pass


def test_text_in_unicode_needs_no_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chardet", None)
    (tmp_path / "a.txt").write_text("Öfen", "utf-8")
    assert load_file(tmp_path / "a.txt")[0].page_content == "Öfen"
    (tmp_path / "a.txt").write_text("Печь можно открыть", "cp1251")
    with pytest.raises(UnreadableFileError, match="package chardet: pip install"):
        load_file(tmp_path / "a.txt")


def test_pipes_links_and_large_files_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    for name in ("huge.txt", "huge.pdf"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(5_000_000_000)
    for name, reason in {
        "pipe.txt": "not a regular file",
        "loop.txt": "symbolic links",
        "huge.txt": "it has 5,000 MB, more than",
        "huge.pdf": "it has 5,000 MB, more than",
    }.items():
        with pytest.raises(UnreadableFileError, match=reason):
            load_file(tmp_path / name)


def test_html_may_nest_deeper_than_python(tmp_path: Path) -> None:
    path = tmp_path / "deep.html"
    path.write_text("<div>" * 5_000 + "<p>deep <b>inside</b></p>" + "</div>" * 5_000, "utf-8")
    assert load_file(path)[0].page_content == "deep inside"


def test_rows_of_tables_are_lines_and_layouts_are_not() -> None:
    row = "<tr><th>Norway</th><td><p>62 <b>euros</b></p></td><td></td></tr>"
    layout = f"<table><tr><td>Menu</td><td><p>Long.</p><table>{row}</table></td></tr></table>"
    (document,) = HtmlParser().lazy_parse(Blob.from_data(f"<p>Allowances</p>{layout}<p>End</p>"))
    lines = [line for line in document.page_content.split("\n") if line]
    assert lines == ["Allowances", "Menu", "Long.", "Norway | 62 euros", "End"]


def test_lines_may_end_as_on_old_machines() -> None:
    (document,) = TextParser().lazy_parse(Blob.from_data(b"one\rtwo\r\nthree\n"))
    assert document.page_content == "one\ntwo\nthree\n"


# Markup as its standards allow it -------------------------------------------------------------------


def html(page: str) -> Document:
    (document,) = HtmlParser().lazy_parse(Blob.from_data(page))
    return document


def lines_of(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        ("<html><head><title>Tea</title><body><p>hot<p>cold", ["hot", "cold"]),
        (
            "<title>Tea</title><p>hot<br>sweet<ul><li>one<li>two</ul>end",
            ["hot", "sweet", "one", "two", "end"],
        ),
        ("<p>January 2023(<i>Someone</i> fed <b>it</b>.)", ["January 2023(Someone fed it.)"]),
        ("<dl><dt>Kiln<dd>An oven.<dt>Cone<dd>A gauge.</dl>", ["Kiln", "An oven.", "Cone", "A gauge."]),
        ("<p>a<!-- b --><p hidden>c<template>d</template><noscript>e</noscript>", ["a"]),
        ("<pre>\nif x:\n    y  = <b>1</b>\n</pre>z", ["if x:", "    y  = 1", "z"]),
        ("<table><tr><td><pre>1\n2</pre><td><pre>if x:\n    y</pre></table>", ["1", "2", "if x:", "    y"]),
        ("<p>half &#xD83D; &nbsp;emoji", ["half \ufffd emoji"]),
    ],
)
def test_html_is_read_as_a_browser_shows_it(page: str, lines: list[str]) -> None:
    assert lines_of(html(page).page_content) == lines


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        ("<tr><th>Room<th>Per day<tr><td>Birch<td>180 EUR", ["Room: Birch; Per day: 180 EUR"]),
        ("<tr><td>Room<td>Per day<tr><td>Birch<td>180", ["Room: Birch; Per day: 180"]),
        (
            "<tr><td>Name<td>Ann<tr><td>Age<td>30<tr><td>Town<td>Bonn",
            ["Name | Ann", "Age | 30", "Town | Bonn"],
        ),
        (
            "<tr><th rowspan=2>Room<th colspan=2>Price<tr><th>Day<th>Night<tr><td>Oak<td>180<td>90",
            ["Room: Oak; Price Day: 180; Price Night: 90"],
        ),
        (
            "<tr><th>Day<th>Who<tr><td rowspan=2>Monday<td>Ann<tr><td>Paul",
            ["Day: Monday; Who: Ann", "Day: Monday; Who: Paul"],
        ),
        ("<thead><tr><td>A<td>B</thead><tfoot><tr><td>1<td>2</tfoot>", ["A: 1; B: 2"]),
        ("<thead><tr><th>A<th>B</thead>", ["A | B"]),
        ("<caption>Prices</caption><tr><th>A<tr><td>1<br>2", ["Prices", "A: 1 2"]),
    ],
)
def test_a_row_names_its_columns(table: str, lines: list[str]) -> None:
    assert lines_of(html(f"<table>{table}</table>").page_content) == lines


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.md", "| Room | Per day |\n|---|--:|\n| Birch | **180** |\n", ["Room: Birch; Per day: 180"]),
        ("a.csv", '\ufeff"last, first",age\r\n"Doe, Jane",30\r\n', ["last, first: Doe, Jane; age: 30"]),
        ("a.csv", "Zimmer;Preis\nGr\xfcn;12,50\n", ["Zimmer: Gr\xfcn; Preis: 12,50"]),
        ("a.csv", 'item,note\nkiln,"late,\nnever early"\n', ["item: kiln; note: late, never early"]),
        ("a.csv", "a,b\n1\n1,2,3\n\n", ["a: 1", "a: 1; b: 2; 3"]),
        ("a.csv", "1,2\n3,4\n", ["1 | 2", "3 | 4"]),
        ("a.tsv", "Room\tDay\nOak\t180\n", ["Room: Oak; Day: 180"]),
    ],
)
def test_so_it_does_in_markdown_and_csv(tmp_path: Path, name: str, content: str, lines: list[str]) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert lines_of(load_file(tmp_path / name)[0].page_content) == lines


def test_word_tables_name_their_columns_and_deleted_text_is_gone(tmp_path: Path) -> None:
    word = docx.Document()
    table = word.add_table(2, 2)
    for row, texts in zip(table.rows, (("Room", "Per day"), ("Birch", "180")), strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    merged = word.add_table(2, 2)
    merged.cell(0, 0).merge(merged.cell(0, 1)).text = "Both"
    merged.cell(1, 0).text, merged.cell(1, 1).text = "one", "other"
    paragraph = word.add_paragraph("It costs ")
    deleted = parse_xml(f"<w:del {nsdecls('w')}><w:r><w:delText>200</w:delText></w:r></w:del>")
    paragraph._p.append(deleted)
    paragraph.add_run("180.")
    word.save(str(tmp_path / "a.docx"))
    assert lines_of(load_file(tmp_path / "a.docx")[0].page_content) == [
        "Room: Birch; Per day: 180",
        "Both",
        "one | other",
        "It costs 180.",
    ]


@pytest.mark.parametrize(
    ("name", "content", "title"),
    [
        ("a.md", "```sh\n# comment\n```\n\n~~~\n# other\n~~~\n\n    # indented\n", "a.md"),
        ("a.md", "```\n# comment\n```\n\n# The *kiln* [manual](x.md)\n", "The kiln manual"),
        ("a.md", "<!--\n# not this\n-->\n# This\n", "This"),
        ("a.md", "---\ntitle: 'My notes'\n---\n\n# Kilns\n", "My notes"),
        ("a.md", "Kilns\n=====\n\ntext", "Kilns"),
        ("a.txt", "Run:\n\n    # comment\n    ls\n", "a.txt"),
        ("a.rst", "# comment\n\ntext", "a.rst"),
        ("a.html", "<p>no title", "a.html"),
        (
            "a.ipynb",
            json.dumps(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("# x")])),
            "a.ipynb",
        ),
    ],
)
def test_a_title_is_the_documents_own_or_its_files_name(
    tmp_path: Path, name: str, content: str, title: str
) -> None:
    (tmp_path / name).write_text(content, "utf-8")
    assert load_file(tmp_path / name)[0].metadata["title"] == title


def test_headings_lead_to_what_stands_below_them(tmp_path: Path) -> None:
    sections = {"a": "Hall", "b": "Hall > Rooms", "c": "Hall > Rooms > Oak", "d": "Garden"}
    marks = {"Hall": 1, "Rooms": 2, "Oak": 3, "Garden": 1}
    markdown = "# Handbook\n\n"
    for text, path in sections.items():
        name = path.split(" > ")[-1]
        markdown += f"{'#' * (marks[name] + 1)} {name}\n\n{text}\n\n"
    page = re.sub(
        r"(#+) (.*)\n", lambda found: f"<h{len(found[1])}>{found[2]}</h{len(found[1])}>\n", markdown
    )
    for name, content in (("a.md", markdown), ("a.html", page)):
        (tmp_path / name).write_text(content, "utf-8")
        (document,) = load_file(tmp_path / name)
        assert document.metadata["title"] == "Handbook"
        found = {}
        starts = document.metadata["headings"]
        for (start, path), end in zip(starts, [*[start for start, _ in starts[1:]], None], strict=True):
            found[document.page_content[start:end].split()[-1]] = path
        assert found == sections


def test_halves_of_characters_in_notebooks_are_joined_or_replaced(tmp_path: Path) -> None:
    cell = nbformat.v4.new_markdown_cell("half \ud83d, both \ud83d\ude00")
    (tmp_path / "a.ipynb").write_text(json.dumps(nbformat.v4.new_notebook(cells=[cell])), "utf-8")
    assert load_file(tmp_path / "a.ipynb")[0].page_content == "half \ufffd, both 😀"


def test_a_table_of_excel_is_read_without_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('sep=;\nName;Note\nA;"two\nlines; and more"\nB;x\n', "utf-8")
    (document,) = load_file(tmp_path / "a.csv")
    assert document.page_content == "Name: A; Note: two lines; and more\n\nName: B; Note: x"


# Documents that are not what they should be --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "title"),
    [
        ("a.md", '+++\ntitle = "From TOML"\n+++\n# Other\ntext\n', "From TOML"),
        ("b.md", "---\ntitle: >-\n  Folded\n  title\n---\nbody\n", "Folded title"),
        ("c.md", "---\r\ntitle: 'It is: quoted'\r\n---\r\ntext\r\n", "It is: quoted"),
        ("d.md", "```sh\n# a comment\n```\n\ntext\n", "d.md"),
        ("e.md", "~~~\n# none\n~~~\n\nUnderlined\n==========\nbody\n", "Underlined"),
        ("f.md", "<!-- # none -->\n# Real\nx\n", "Real"),
        ("g.html", "<title>A &amp; B</title><svg><title>icon</title></svg><h1>H</h1>", "A & B"),
    ],
)
def test_a_title_is_the_documents_own_or_the_name_of_its_file(
    name: str, content: str, title: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    (document,) = load_file(tmp_path / name)
    assert document.metadata["title"] == title


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.md", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "a Git LFS pointer"),
        ("b.txt", b"%PDF-1.4\n1 0 obj", "a PDF file"),
        ("c.txt", b"{\\rtf1 Hello}", "an RTF file"),
        ("d.csv", b"%PDF-1.7\n", "a PDF file"),
        ("e.html", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        ("f.pdf", b"<html>Not found</html>", "not a readable PDF file"),
        ("g.docx", b"<html>Log in</html>", "not a readable DOCX file"),
        ("h.md", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)), "not text"),
    ],
)
def test_a_file_that_is_not_what_its_ending_says_is_named(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableFileError, match=says):
        load_file(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"one \0 zero among many other words", "one \ufffd zero among many other words"),
        ("Der B\u00e4r schl\u00e4ft.".encode("utf-16-le"), "Der B\u00e4r schl\u00e4ft."),
        ("Der B\u00e4r schl\u00e4ft.".encode("utf-16-be"), "Der B\u00e4r schl\u00e4ft."),
    ],
)
def test_what_is_no_unicode_is_replaced_and_the_rest_is_read(
    content: bytes, text: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (document,) = load_file(tmp_path / "a.txt")
    assert document.page_content == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<ul><li>one<ul><li>a<li>b</ul><li>two</ul><p>x<p>y", "one a b two x y"),
        ("<table><tr><th>N<th>V<tr><td>a<script>'<td>no'</script><td>1</table>", "N: a; V: 1"),
        ("<table><tr><td>Out<td><table><tr><th>N<th>V<tr><td>a<td>1</table></table>", "Out N: a; V: 1"),
        (
            "<table><tr><th rowspan=2>R<th colspan=2>P<tr><th>D<th>W<tr><td>O<td>5<td>30</table>",
            "R: O; P D: 5; P W: 30",
        ),
        ("<p>caf&eacute; &lt;b&gt; AT&T &amp;amp; &#xD83D;", "café <b> AT&T &amp; \ufffd"),
        ("<p style='Display : none'>no</p><p hidden>no<p>yes<template>no</template>", "yes"),
        ("<dl><dt>Term<dd>Meaning<dt>Other<dd>More</dl>", "Term Meaning Other More"),
    ],
)
def test_a_page_is_read_as_a_browser_shows_it(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(page, "utf-8")
    (document,) = load_file(tmp_path / "a.html")
    assert " ".join(document.page_content.split()) == text
