"""Runs as HTML. Pure; every text is escaped, and nothing here needs a script or another file.

There are no style attributes, which the page's policy forbids: bars are SVG, colours are classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from sot_chains.rendering.lane import Bar, Block, Lane

STYLE = Path(__file__).with_name("style.css").read_text("utf-8")
_NUM_SOURCE_COLOURS = 6


@dataclass(frozen=True)
class Run:
    """Answers to one question by one model, side by side. Jupyter displays it."""

    question: str
    model: str
    lanes: tuple[Lane, ...] = ()

    def _repr_html_(self) -> str:
        return _with_style(self)

    def fragment(self) -> str:
        """The answers, a timeline and a table, without their style."""
        lanes = "".join(map(_lane, self.lanes))
        return f'<div class="sot-run"><div class="lanes">{lanes}</div>{_timeline(self)}{_table(self)}</div>'

    def page(self) -> str:
        """A document of its own, which needs no other file."""
        title = escape(f"{self.question} ({self.model})")
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'\">"
            f'<title>{title}</title></head><body class="sot-page">{_with_style(self)}'
            f'<p class="sot-run made">Answered by {escape(self.model)}, shown by langchain-parallel-decoding.'
            "</p></body></html>"
        )


def _with_style(run: Run) -> str:
    asked = f'<h1 class="sot-run question">{escape(run.question)}</h1>' if run.question else ""
    return f"<style>{STYLE}</style>{asked}{run.fragment()}"


def _lane(lane: Lane) -> str:
    sources = {source: f"s{n % _NUM_SOURCE_COLOURS}" for n, source in enumerate(lane.sources)}
    blocks = "".join(_block(block, sources) for block in lane.blocks)
    legend = "".join(f'<mark class="{sources[one]}">{escape(one)}</mark> ' for one in sources)
    return (
        f'<section class="lane {escape(lane.name)}"><h2>{escape(lane.title)} '
        f'<span class="clock">{_seconds(lane.seconds)}</span></h2>'
        f'<p class="note">{escape(lane.note)}</p>{blocks}'
        + (f'<p class="legend">Copied from: {legend}</p>' if legend else "")
        + "</section>"
    )


def _block(block: Block, sources: dict[str, str]) -> str:
    text = "".join(
        escape(part.text)
        if part.source is None
        else f'<mark class="{sources[part.source]}" title="{escape(part.source)}">{escape(part.text)}</mark>'
        for part in block.parts
    )
    heading = f"<h3>{escape(block.heading)}</h3>" if block.heading else ""
    note = f'<p class="note">{escape(block.note)}</p>' if block.note else ""
    return f'<div class="block">{heading}<p class="text">{text}</p>{note}</div>'


def _timeline(run: Run) -> str:
    longest = max((bar.end for lane in run.lanes for bar in lane.bars), default=0.0)
    rows = "".join(
        f'<h4>{escape(lane.title)}</h4><ol class="bars {escape(lane.name)}">'
        + "".join(_bar(bar, longest) for bar in lane.bars)
        + "</ol>"
        for lane in run.lanes
        if lane.bars
    )
    said = "Each bar is a model call; its pale part is the wait for the first text."
    return f'<section class="timeline"><h2>Timeline</h2><p class="note">{said}</p>{rows}</section>'


def _bar(bar: Bar, longest: float) -> str:
    scale = 100 / longest if longest else 0.0
    first = bar.end if bar.first_text is None else bar.first_text
    spans = ((bar.start, first, "wait"), (first, bar.end, "write"))
    rects = "".join(
        f'<rect class="{kind}" x="{begin * scale:.2f}%" width="{max(0.0, end - begin) * scale:.2f}%" '
        'height="100%"/>'
        for begin, end, kind in spans
    )
    said = f"from {bar.start:.2f} to {bar.end:.2f} s"
    return (
        f'<li><span class="label">{escape(bar.label)}</span>'
        f'<svg role="img" aria-label="{said}"><title>{said}</title>{rects}</svg>'
        f'<span class="time">{_seconds(bar.end - bar.start)}</span></li>'
    )


def _table(run: Run) -> str:
    plain = next((lane.seconds for lane in run.lanes if lane.name == "plain"), None)
    heads = ("", "seconds", "speed", "first text", "tokens read", "tokens written", "calls", "money")
    rows = "".join(
        f'<tr class="{escape(lane.name)}"><th scope="row">{escape(lane.title)}</th>'
        + "".join(f"<td>{cell}</td>" for cell in _cells(lane, plain))
        + "</tr>"
        for lane in run.lanes
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        '<section class="figures"><h2>What it took</h2>'
        '<div class="wide" tabindex="0" role="region" aria-label="What it took">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _cells(lane: Lane, plain_seconds: float | None) -> list[str]:
    speed = f"{plain_seconds / lane.seconds:.1f}×" if plain_seconds and lane.seconds else "–"
    counts = (lane.input_tokens, lane.output_tokens, lane.num_calls)
    return [
        _seconds(lane.seconds),
        speed,
        _seconds(lane.first_text_seconds),
        *("–" if count is None else f"{count:,}" for count in counts),
        "–" if lane.price is None else f"{lane.price:.5f}",
    ]


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f} s"
