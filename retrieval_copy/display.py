"""Shows an answer with its citations in notebooks and terminals.

Knows messages with citations, and documents. Does not know how the answers were produced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

from retrieval_copy.citations.citations import Citation, document_and_page, document_name

# Distinguishable with red-green colour blindness.
_COLOURS = ("bright_blue", "bright_yellow", "bright_green", "bright_magenta", "bright_cyan", "bright_red")
_LONGEST_NAME = 60


class Segment(NamedTuple):
    """A part of an answer, and the citation that covers it, if any."""

    text: str
    citation: Citation | None


def segments(text: str, citations: Sequence[Citation]) -> list[Segment]:
    """Splits ``text`` into parts of one source each; an overlap of citations goes to the longest."""
    owner: list[Citation | None] = [None] * len(text)
    for citation in sorted(citations, key=lambda citation: citation["end"] - citation["start"]):
        owner[citation["start"] : citation["end"]] = [citation] * (citation["end"] - citation["start"])
    parts: list[Segment] = []
    for _, run in groupby(zip(text, owner, strict=True), key=lambda pair: id(pair[1])):
        characters = list(run)
        parts.append(Segment("".join(character for character, _ in characters), characters[0][1]))
    return parts


def find_citations(message: AIMessage) -> list[Citation]:
    """The citations of an answer.

    Raises:
        ValueError: The message carries no citations, not even an empty list.
    """
    citations: list[Citation] | None = message.response_metadata.get("citations")
    if citations is None:
        raise ValueError(
            'the message has no response_metadata["citations"]: expected an answer of RetrievalCopyChain '
            "(in a stream the sum of all chunks has them)"
        )
    return citations


class CitedAnswer(JupyterMixin):
    """An answer with its cited spans coloured by source and numbered; Jupyter and ``rich`` display it.

    Raises:
        ValueError: The message carries no citations, not even an empty list.
    """

    def __init__(self, message: AIMessage) -> None:
        self._citations = find_citations(message)
        self._segments = segments(str(message.text), self._citations)
        names = dict.fromkeys(map(document_name, self._citations))
        self._colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = Text()
        for segment, numbers in self._numbered():
            style = self._colours[document_name(segment.citation)] if segment.citation else ""
            shown.append(segment.text, style)
            for number in numbers:
                shown.append(f"[{number}]", "dim")
        yield shown
        if self._citations:
            yield ""
        for number, citation in enumerate(self._citations, start=1):
            style = self._colours[document_name(citation)]
            yield Text.assemble((f"[{number}]", style), f" {_footnote(citation)}")

    def _numbered(self) -> Iterator[tuple[Segment, list[int]]]:
        """The segments, each with the numbers of the citations that end with it."""
        end = 0
        for segment in self._segments:
            start, end = end, end + len(segment.text)
            yield segment, [n for n, one in enumerate(self._citations, start=1) if start < one["end"] <= end]


class CitedPassage(JupyterMixin):
    """A retrieved passage with the cited text highlighted; Jupyter and ``rich`` display it.

    Where there is no colour it stands between ``>>>`` and ``<<<``.
    """

    def __init__(self, document: Document, citation: Citation) -> None:
        self._citation = citation
        text = document.page_content
        start, end = citation["document_start"], citation["document_end"]
        self._parts = text[:start], text[start:end], text[end:]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        before, cited, after = self._parts
        yield Text(document_and_page(self._citation), "bold")
        if console.color_system is None:
            cited = f">>>{cited}<<<"
        yield Text.assemble(before, (cited, "black on bright_yellow"), after)


def _footnote(citation: Citation) -> str:
    others = dict.fromkeys(map(document_and_page, citation["also_in"]))
    others.pop(document_and_page(citation), None)  # another passage of the same source
    also = "".join(f", also in {_shortened(other)}" for other in others)
    return f"{_shortened(document_and_page(citation))}{also}: {citation['num_tokens']} words"


def _shortened(name: str, longest: int = _LONGEST_NAME) -> str:
    return name if len(name) <= longest else "…" + name[1 - longest :]
