"""Reads HTML, Markdown and tables as text with its headings; a row of a table names its columns.

Knows markup. Does not know files. HTML needs ``selectolax``, whose parser keeps to the standard.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, count, product
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from selectolax.lexbor import LexborNode

_HIDDEN_TAGS = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_HEADING_TAGS = {f"h{level}": level for level in range(1, 7)}
_PARAGRAPH_TAGS = frozenset(
    {"blockquote", "caption", "dl", "li", "ol", "p", "pre", "table", "td", "th", "tr", "ul", *_HEADING_TAGS}
)
_BLOCK_TAGS = _PARAGRAPH_TAGS | frozenset(
    """
    address article aside br dd details div dt fieldset figcaption figure footer form header hr main nav
    option section summary
    """.split()  # noqa: SIM905 - easier to read than a list of strings
)
_MOST_ROW_CHARACTERS, _MOST_SPANNED, _SNIFFED_CHARACTERS = 400, 100, 8_000  # longer rows lay out a page
_NOT_SHOWN = re.compile(r"(?i)display\s*:\s*none")
# A first line that stands by itself, without the mark that ends a sentence, names a text.
_FIRST_LINE = regex.compile(r"\s*(\p{L}[^\n]{2,80}[\p{L}\p{N})])[ \t]*\n[ \t]*\n")
_FRONT_MATTER = re.compile(r"(---|\+\+\+)\n(?:.*\n)*?(?:\1|\.\.\.)\n")  # in YAML or TOML
_FRONT_TITLE = re.compile(r"(?m)^title *[:=] *(?:[>|][-+]? *\n((?: +.*\n)+)|(['\"]?)(.+)\2 *$)")
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
_MARKS = re.compile(r"[*`]+|(?<!\w)_+|_+(?!\w)|(?<=\s)#+$")


class Heading(NamedTuple):
    """A heading, by where its line starts and ends in a text."""

    start: int
    end: int
    level: int
    text: str


@dataclass(frozen=True)
class MarkedUp:
    """A text with its headings, and its title if it has one."""

    text: str
    headings: Sequence[Heading] = ()
    title: str | None = None

    def followed_by(self, other: MarkedUp) -> MarkedUp:
        """Both, with a blank line between them; the title is that of the first that has one."""
        before = f"{self.text}\n\n" if self.text else ""
        by = len(before)
        moved = [one._replace(start=one.start + by, end=one.end + by) for one in other.headings]
        return MarkedUp(before + other.text, [*self.headings, *moved], self.title or other.title)

    def sections(self) -> list[tuple[int, str]]:
        """Where each section starts, and the path of headings to it, without the title.

        A heading with nothing below it belongs to the section that follows.
        """
        found: list[tuple[int, str]] = []
        above: list[Heading] = []
        end = -1
        for heading in self.headings:
            above = [*(one for one in above if one.level < heading.level), heading]
            path = " > ".join(one.text for one in above if one.text and one.text != self.title)
            is_alone = end >= 0 and not self.text[end : heading.start].strip()
            start = found.pop()[0] if is_alone else heading.start
            found.append((start, path))
            end = heading.end
        return found if any(path for _, path in found) else []


# Tables ----------------------------------------------------------------------------------------------


def table_lines(rows: Sequence[tuple[Sequence[str], bool]]) -> list[str]:
    """A line for each row of a table, given its cells and whether they are the names of the columns."""
    lines: list[str] = []
    names: list[str] = []
    was_header = False
    for cells, is_header in rows:
        if is_header:
            above = names if was_header else []
            names = [
                " ".join(dict.fromkeys(filter(None, (*above[number : number + 1], cell))))
                for number, cell in enumerate(cells)
            ]
        else:
            named = zip([*names, *[""] * len(cells)], cells, strict=False)
            parts = [f"{name}: {cell}" if name else cell for name, cell in named if cell]
            lines.append(("; " if any(names) else " | ").join(parts))
        was_header = is_header
    return list(filter(None, lines)) or [" | ".join(filter(None, names))]


def names_columns(rows: Sequence[Sequence[str]], *, is_likely: bool) -> bool:
    """Whether the first row names the columns: short words over values, of which a column is of numbers.

    ``is_likely`` for tables that usually have such a row: columns of numbers are not asked for.
    """
    first, *others = rows
    names = set(filter(None, first))
    if len(names) < 2 or len(names) < len(first) or not others or any(map(_has_digit, first)):
        return False
    columns = ([row[number] for row in others if number < len(row)] for number in range(len(first)))
    return is_likely or any(column and all(map(_has_digit, column)) for column in columns)


def _has_digit(cell: str) -> bool:
    return any(map(str.isdigit, cell))


def read_csv(text: str) -> MarkedUp:
    """The rows of a table that commas, semicolons, bars or tabulators separate."""
    text = re.sub(r"\Asep=.\n", "", text)  # in Excel's files
    try:
        dialect: Any = csv.Sniffer().sniff(text[:_SNIFFED_CHARACTERS], ",;\t|")
    except csv.Error:  # a single column, for one
        dialect = csv.excel
    read = csv.reader(io.StringIO(text), dialect)
    rows = [[" ".join(cell.split()) for cell in row] for row in read if any(map(str.strip, row))]
    has_names = bool(rows) and names_columns(rows, is_likely=True)
    return MarkedUp("\n\n".join(table_lines([(row, has_names and row is rows[0]) for row in rows])))


# HTML ------------------------------------------------------------------------------------------------


def read_html(page: str) -> MarkedUp:
    """The text of a page as a browser shows it: blocks on lines of their own, ``<pre>`` as it stands."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(page)
    if tree.root is None:
        return MarkedUp("")
    written = _Lines.of(tree.root)
    named = tree.css_first("head title") or tree.css_first("h1")
    return written.whole(" ".join(named.text().split()) if named else "")


@dataclass
class _Lines:
    """The lines of a page so far; white space collapses except in ``<pre>``."""

    lines: list[str] = field(default_factory=list)
    _line: list[str] = field(default_factory=list)
    _headings: list[tuple[int, int, int]] = field(default_factory=list)  # first line, last line, level
    _num_pre: int = 0

    @classmethod
    def of(cls, root: LexborNode) -> _Lines:
        """Reads what ``root`` holds. Not recursive: some pages nest deeper than Python may."""
        written = cls()
        open_nodes = [(root, 0, root.iter(include_text=True))]
        while open_nodes:
            parent, first, children = open_nodes[-1]
            node = next(children, None)
            tag = (node or parent).tag or ""
            if node is None:
                written._end(tag, first)
                open_nodes.pop()
            elif tag == "-text":
                written._add(node.text_content or "")
            elif (
                tag in _HIDDEN_TAGS
                or tag.startswith("-")
                or "hidden" in node.attributes
                or _NOT_SHOWN.search(node.attributes.get("style") or "")
            ):
                continue
            elif tag == "table" and (rows := _table_rows(node)):
                for row in rows:
                    written._end_paragraph()
                    written.lines.append(row)
                written._end_paragraph()
            else:
                written._break_at(tag)
                written._num_pre += tag == "pre"
                open_nodes.append((node, len(written.lines), node.iter(include_text=True)))
        written._end_line()
        return written

    def whole(self, title: str) -> MarkedUp:
        while self.lines and not self.lines[-1]:
            self.lines.pop()
        starts = [*accumulate((len(line) + 1 for line in self.lines), initial=0)]
        headings = [
            Heading(starts[first], starts[last], level, " ".join(" ".join(self.lines[first:last]).split()))
            for first, last, level in self._headings
            if first < last < len(starts)
        ]
        return MarkedUp("\n".join(self.lines), headings, title or None)

    def _end(self, tag: str, first: int) -> None:
        if level := _HEADING_TAGS.get(tag):
            self._end_line()
            self._headings.append((first, len(self.lines), level))
        self._num_pre -= tag == "pre"
        self._break_at(tag)

    def _break_at(self, tag: str) -> None:
        if tag in _PARAGRAPH_TAGS:
            self._end_paragraph()
        elif tag in _BLOCK_TAGS:
            self._end_line()

    def _add(self, text: str) -> None:
        if self._num_pre:
            *whole, text = text.split("\n")
            for line in whole:
                self._line.append(line)
                self.lines.append("".join(self._line).rstrip())
                self._line = []
        else:
            text = re.sub(r"\s+", " ", text)
            if not self._line or self._line[-1].endswith(" "):
                text = text.removeprefix(" ")
        if text:
            self._line.append(text)

    def _end_line(self) -> None:
        if line := "".join(self._line).rstrip():
            self.lines.append(line)
        self._line = []

    def _end_paragraph(self) -> None:
        self._end_line()
        if self.lines and self.lines[-1]:
            self.lines.append("")


def _table_rows(table: LexborNode) -> list[str]:
    """The lines of a table; none if it lays out a page."""
    if any(node.tag in ("table", "pre") for node in table.traverse() if node != table):
        return []
    texts: dict[tuple[int, int], str] = {}  # by row and column
    headers = list[bool]()
    for number, row in enumerate(table.css("tr")):
        cells = [cell for cell in row.iter() if cell.tag in ("td", "th")]
        for cell in cells:
            column = next(free for free in count() if (number, free) not in texts)
            text = " ".join(" ".join(_Lines.of(cell).lines).split())
            for below, right in product(range(_number(cell, "rowspan")), range(_number(cell, "colspan"))):
                texts[number + below, column + right] = "" if right and cell.tag == "td" else text
        is_head = row.parent is not None and row.parent.tag == "thead"
        headers.append(is_head or all(cell.tag == "th" for cell in cells))
    columns = range(1 + max((column for _, column in texts), default=0))
    rows = [[texts.get((number, column), "") for column in columns] for number in range(len(headers))]
    if rows and not any(headers):
        headers[0] = names_columns(rows, is_likely=False)
    lines = table_lines([*zip(rows, headers, strict=True)])
    if not any(headers) and max(map(len, lines), default=0) > _MOST_ROW_CHARACTERS:
        return []
    caption = table.css_first("caption")
    return [" ".join(caption.text().split()), *lines] if caption else lines


def _number(cell: LexborNode, name: str) -> int:
    given = cell.attributes.get(name) or ""
    return min(max(1, int(given)), _MOST_SPANNED) if given.isdecimal() else 1


# Markdown --------------------------------------------------------------------------------------------


def read_text(text: str) -> MarkedUp:
    """The text as it stands."""
    first = _FIRST_LINE.match(text)
    return MarkedUp(text, title=first[1] if first else None)


def read_markdown(text: str) -> MarkedUp:
    """The text as it stands, but for tables: a line for each row."""
    front = _FRONT_MATTER.match(text)
    num_skipped = text.count("\n", 0, front.end()) if front else 0
    lines: list[str | None] = [*text.split("\n")]
    tokens = _block_tokens("\n" * num_skipped + text[front.end() if front else 0 :])
    marks: list[tuple[int, int, int, str]] = []  # first line, line after the last, level, text
    for number, token in enumerate(tokens):
        if token.type == "heading_open" and token.level == 0 and token.map:
            first, last = token.map
            marks.append((first, last, int(token.tag[1:]), _plain(tokens[number + 1].content)))
        elif token.type == "table_open" and token.map:
            first, last = token.map
            rows = "\n\n".join(table_lines([*_cells(tokens[number:])]))
            lines[first:last] = [rows, *[None] * (last - first - 1)]  # the others keep their numbers
    starts = [*accumulate((0 if line is None else len(line) + 1 for line in lines), initial=0)]
    headings = [Heading(starts[first], starts[last], level, said) for first, last, level, said in marks]
    title = _FRONT_TITLE.search(front[0]) if front else None
    named = " ".join((title[1] or title[3]).split()) if title else None
    first_level = next((one.text for one in headings if one.level == 1 and one.text), None)
    text = "\n".join(line for line in lines if line is not None)
    return MarkedUp(text, headings, named or first_level or read_text(text).title)


def _plain(inline: str) -> str:
    return _MARKS.sub("", _LINK.sub(r"\1", " ".join(inline.split()))).strip()


def _cells(tokens: Sequence[Token]) -> Iterator[tuple[list[str], bool]]:
    row: list[str] = []
    is_header = False
    for token in tokens:
        match token.type:
            case "thead_open" | "thead_close":
                is_header = token.type == "thead_open"
            case "tr_open":
                row = []
            case "inline":
                row.append(_plain(token.content))
            case "tr_close":
                yield row, is_header
            case "table_close":
                return


def _block_tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    reader = _reader()
    reader.block.parse(text, reader, {}, tokens)
    return tokens


@cache
def _reader() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("table")
