"""Shows an answer with its citations, coloured by source, in notebooks and terminals.

Knows messages with citations. Does not know how they were produced.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from langchain_core.messages import AIMessage
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from retrieval_copy.citations import Citation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Background in notebooks, colour name in terminals; distinguishable with red-green colour blindness.
_COLOURS = (
    ("#cfe3f5", "bright_blue"),
    ("#fde7b0", "bright_yellow"),
    ("#d9efd3", "bright_green"),
    ("#f6d5e5", "bright_magenta"),
    ("#d5f0ee", "bright_cyan"),
    ("#f8dcc6", "bright_red"),
)
_PLAIN, _COPIED = "#c9ced6", "#2d6a9f"
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
            place = (
                f"{name}, characters {segment.citation['document_start']}-{segment.citation['document_end']}"
            )
            parts.append(
                f'<mark style="background:{self._colours[name][0]};color:#1a1a1a" '
                f'title="{html.escape(place)}">{escaped}</mark>'
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
            where = f"characters {citation['document_start']}-{citation['document_end']}"
            yield Text.assemble(
                (f"[{number}] {name}", self._colours[name][1]), f", {where}: {citation['num_tokens']} words"
            )

    def __repr__(self) -> str:
        return f"CitedAnswer({len(self._citations)} citations)"


def _name_of(citation: Citation) -> str:
    metadata = citation["metadata"]
    name = metadata.get("source") or metadata.get("title") or citation["document_id"]
    shown = str(name or f"document {citation['document'] + 1}")
    return shown if len(shown) <= _LONGEST_NAME else "…" + shown[1 - _LONGEST_NAME :]


def forwards(messages: Mapping[str, AIMessage]) -> Figure:
    """Plots the forwards of each answer beside those of plain decoding, which takes one per token.

    Args:
        messages: Answers of a chain over ``ChatLocal``, by name.

    Returns:
        A matplotlib figure. It is not registered with pyplot, so it need not be closed.

    Raises:
        ValueError: There is no message, or one has no decoding statistics.
        ImportError: Matplotlib is not installed.
    """
    decoding = {name: message.response_metadata.get("decoding") for name, message in messages.items()}
    if not messages or None in decoding.values():
        raise ValueError(
            'forwards() needs messages with response_metadata["decoding"], as ChatLocal gives it; '
            f"got {decoding or 'none'}"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install '.[notebooks]' in a checkout") from error

    class Forwards(Figure):
        """A figure that Jupyter displays even if pyplot was never imported."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=120)
            return picture.getvalue()

    figure = Forwards(figsize=(8, 0.8 + 0.5 * len(messages)), layout="constrained")
    axes = figure.add_subplot()
    for height, message in enumerate(messages.values()):
        num_forwards = message.response_metadata["decoding"]["num_forwards"]
        rate = message.response_metadata["decoding"]["tokens_per_forward"]
        num_tokens = round(num_forwards * rate)
        axes.barh(height, num_tokens, height=0.6, color=_PLAIN)
        axes.barh(height, num_forwards, height=0.6, color=_COPIED)
        axes.annotate(
            f" {num_tokens} tokens, {num_forwards} forwards", (num_tokens, height), va="center", fontsize=9
        )
    axes.set_yticks(range(len(messages)), list(messages))
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set_xlabel("forwards: with copying (dark), one token at a time (light)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    return figure
