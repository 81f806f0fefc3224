"""Shows an answer with its citations, coloured by source, in notebooks and terminals.

Knows messages with citations. Does not know how they were produced.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.messages import AIMessage
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from retrieval_copy.citations.citations import Citation, Passage

# Background in notebooks, colour name in terminals; distinguishable with red-green colour blindness.
_COLOURS = (
    ("#cfe3f5", "bright_blue"),
    ("#fde7b0", "bright_yellow"),
    ("#d9efd3", "bright_green"),
    ("#f6d5e5", "bright_magenta"),
    ("#d5f0ee", "bright_cyan"),
    ("#f8dcc6", "bright_red"),
)
_LONGEST_NAME = 60


@dataclass(frozen=True)
class Segment:
    """A part of an answer.

    Attributes:
        text: The text of the part.
        citation: The citation that covers it; ``None`` if no document contains it.
    """

    text: str
    citation: Citation | None


def segments(text: str, citations: Sequence[Citation]) -> list[Segment]:
    """Splits ``text`` into parts of one source each; an overlap of citations goes to the longest."""
    owner: list[Citation | None] = [None] * len(text)
    for citation in sorted(citations, key=lambda citation: citation["end"] - citation["start"]):
        for place in range(citation["start"], citation["end"]):
            owner[place] = citation
    parts: list[Segment] = []
    start = 0
    for place in range(1, len(text) + 1):
        if place == len(text) or owner[place] is not owner[start]:
            parts.append(Segment(text[start:place], owner[start]))
            start = place
    return parts if text else []


class CitedAnswer:
    """An answer with its cited spans coloured by source; Jupyter and ``rich`` display it.

    Args:
        message: An answer from :class:`~retrieval_copy.RetrievalCopyChain`.

    Raises:
        ValueError: The message carries no citations, not even an empty list.
    """

    def __init__(self, message: AIMessage) -> None:
        citations: list[Citation] | None = message.response_metadata.get("citations")
        if citations is None:
            raise ValueError(
                'the message has no response_metadata["citations"]: expected an answer of RetrievalCopyChain '
                "(in a stream the last chunk has them, and the sum of all chunks)"
            )
        self._citations = citations
        self._segments = segments(str(message.text), citations)
        names = dict.fromkeys(map(_name_of, citations))
        self._colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}

    def _repr_html_(self) -> str:
        parts = []
        for segment in self._segments:
            escaped = html.escape(segment.text)
            if segment.citation is None:
                parts.append(escaped)
                continue
            name = _name_of(segment.citation)
            place = html.escape(f"{name}, {_place_of(segment.citation)}")
            parts.append(
                f'<mark style="background:{self._colours[name][0]};color:#1a1a1a" '
                f'title="{place}">{escaped}</mark>'
            )
        legend = " ".join(
            f'<mark style="background:{colour};color:#1a1a1a">{html.escape(name)}</mark>'
            for name, (colour, _) in self._colours.items()
        )
        answer = f'<div style="white-space:pre-wrap;max-width:50em">{"".join(parts)}</div>'
        return answer + (f'<div style="margin-top:.6em;font-size:85%">{legend}</div>' if legend else "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = Text()
        for segment in self._segments:
            style = self._colours[_name_of(segment.citation)][1] if segment.citation else ""
            shown.append(segment.text, style)
        yield shown
        for number, citation in enumerate(self._citations, start=1):
            name = _name_of(citation)
            where = f"{_place_of(citation)}: {citation['num_tokens']} words"
            yield Text.assemble((f"[{number}] {name}", self._colours[name][1]), f", {where}")

    def __repr__(self) -> str:
        return f"CitedAnswer({len(self._citations)} citations)"


def _place_of(citation: Citation) -> str:
    place = f"characters {citation['document_start']}-{citation['document_end']}"
    others = dict.fromkeys(map(_name_of, citation["also_in"]))
    others.pop(_name_of(citation), None)  # another passage of the same source
    return f"{place}, also in {', '.join(others)}" if others else place


def _name_of(passage: Passage) -> str:
    metadata = passage["metadata"]
    name = metadata.get("source") or metadata.get("title") or passage["document_id"]
    shown = str(name or f"document {passage['document'] + 1}")
    return shown if len(shown) <= _LONGEST_NAME else "…" + shown[1 - _LONGEST_NAME :]
