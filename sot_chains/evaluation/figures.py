"""The report's figures as SVG: scatter plot, bars with whiskers, stacked bars. Knows numbers and names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = (
    "#2a78d6",
    "#e08a1e",
    "#2e9e6b",
    "#a44fc0",
    "#c8504b",
    "#6b7280",
    "#0f9bb3",
    "#8a6d3b",
    "#d1579e",
    "#4b5bd4",
)
_TEXT, _GRID = "#374151", "#e5e7eb"
_WIDTH, _LEFT, _RIGHT, _ROW = 720, 150, 70, 18


@dataclass(frozen=True)
class Dot:
    """A dot of a scatter plot."""

    name: str
    x: float
    y: float
    series: int


@dataclass(frozen=True)
class Bar:
    """One bar, with an optional confidence interval."""

    value: float
    low: float | None = None
    high: float | None = None


def scatter(dots: Sequence[Dot], series: Sequence[str], *, x_name: str, y_name: str) -> str:
    """A scatter plot of named dots; lines mark parity with plain: a speed-up of 1, a net win rate of 0."""
    height, bottom, top = 420, 50, 34
    x_low, x_high = _range([dot.x for dot in dots] + [1.0])
    y_low, y_high = _range([dot.y for dot in dots] + [0.0])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        return 70 + across * (_WIDTH - 110), height - bottom - up * (height - bottom - top)

    parts = [_legend(series)]
    for x in _ticks(x_low, x_high):
        (left, floor), (_, ceiling) = place(x, y_low), place(x, y_high)
        parts.append(_line(left, floor, left, ceiling, strong=abs(x - 1) < 1e-9))
        parts.append(_text(left, floor + 16, f"{x:g}x", anchor="middle"))
    for y in _ticks(y_low, y_high):
        (left, level), (right, _) = place(x_low, y), place(x_high, y)
        parts.append(_line(left, level, right, level, strong=abs(y) < 1e-9))
        parts.append(_text(left - 6, level + 4, f"{100 * y:+.0f} %", anchor="end"))
    for dot in dots:
        x, y = place(dot.x, dot.y)
        title = f"{dot.name}, {series[dot.series]}: {dot.x:.2f}x, {100 * dot.y:+.0f} %"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{_colour(dot.series)}" fill-opacity="0.75">'
            f"<title>{escape(title)}</title></circle>"
        )
        parts.append(_text(x + 8, y + 4, dot.name))
    parts.append(_text(_WIDTH / 2, height - 12, x_name, anchor="middle"))
    parts.append(
        f'<text transform="translate(14 {height / 2}) rotate(-90)" text-anchor="middle" fill="{_TEXT}">'
        f"{escape(y_name)}</text>"
    )
    return _svg(height, parts, f"{y_name} against {x_name}")


def bars(
    rows: Sequence[tuple[str, Sequence[Bar | None]]],
    series: Sequence[str],
    *,
    name: str,
    base: float = 0.0,
    is_share: bool = False,
) -> str:
    """Horizontal bars drawn from ``base``; each row has one bar per series."""
    group = _ROW * len(series) + 10
    height = 44 + group * len(rows) + 24
    shown = [bar for _, row in rows for bar in row if bar is not None]
    ends = [end for bar in shown for end in (bar.value, bar.low, bar.high) if end is not None]
    low, high = _range([base, *ends])

    def across(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    parts = [_legend(series)]
    floor = 38 + group * len(rows)
    for tick in _ticks(low, high):
        x = across(tick)
        parts.append(_line(x, 36, x, floor, strong=abs(tick - base) < 1e-9))
        parts.append(_text(x, floor + 16, _label(tick, is_share), anchor="middle"))
    for number, (label, row) in enumerate(rows):
        y = 42 + group * number
        parts.append(_text(_LEFT - 8, y + group / 2, label, anchor="end"))
        for place, bar in enumerate(row):
            if bar is None:
                continue
            left, right = sorted((across(base), across(bar.value)))
            middle = y + _ROW * place + _ROW / 2
            title = f"{label}, {series[place]}: {_label(bar.value, is_share)}"
            parts.append(
                f'<rect x="{left:.1f}" y="{middle - 7:.1f}" width="{max(right - left, 1):.1f}" height="14" '
                f'fill="{_colour(place)}"><title>{escape(title)}</title></rect>'
            )
            end = right
            if bar.low is not None and bar.high is not None:
                parts.append(_line(across(bar.low), middle, across(bar.high), middle, strong=True))
                end = max(right, across(bar.high))
            parts.append(_text(end + 4, middle + 4, _label(bar.value, is_share)))
    return _svg(height, parts, name)


def stacked(rows: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], *, name: str) -> str:
    """Horizontal stacked bars of seconds, with one segment per series."""
    height = 44 + (_ROW + 8) * len(rows) + 24
    high = max([sum(row) for _, row in rows] + [1e-9])
    scale = (_WIDTH - _LEFT - _RIGHT) / high
    floor = 38 + (_ROW + 8) * len(rows)
    parts = [_legend(series)]
    for tick in _ticks(0, high):
        parts.append(_line(_LEFT + tick * scale, 36, _LEFT + tick * scale, floor, strong=tick == 0))
        parts.append(_text(_LEFT + tick * scale, floor + 16, f"{tick:g} s", anchor="middle"))
    for number, (label, row) in enumerate(rows):
        y, x = 42 + (_ROW + 8) * number, float(_LEFT)
        parts.append(_text(_LEFT - 8, y + 13, label, anchor="end"))
        for place, seconds in enumerate(row):
            title = f"{label}, {series[place]}: {seconds:.2f} s"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{seconds * scale:.1f}" height="{_ROW}" '
                f'fill="{_colour(place)}"><title>{escape(title)}</title></rect>'
            )
            x += seconds * scale
        parts.append(_text(x + 4, y + 13, f"{sum(row):.2f} s"))
    return _svg(height, parts, name)


def _svg(height: float, parts: Sequence[str], name: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(name, quote=True)}" font-family="system-ui, sans-serif" font-size="12">'
        f"<title>{escape(name)}</title>{''.join(parts)}</svg>"
    )


def _legend(series: Sequence[str]) -> str:
    parts, x = [], float(_LEFT)
    for place, name in enumerate(series):
        parts.append(f'<rect x="{x:.0f}" y="10" width="12" height="12" rx="2" fill="{_colour(place)}"/>')
        parts.append(_text(x + 17, 20, name))
        x += 34 + 7 * len(name)
    return "".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, *, strong: bool) -> str:
    colour = _TEXT if strong else _GRID
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_TEXT}">{escape(text)}</text>'


def _label(value: float, is_share: bool) -> str:
    return f"{100 * value:+.0f} %" if is_share else f"{value:.2f}x"


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` to ``high``."""
    step = 10.0 ** len(str(int(high - low)))
    while (high - low) / step < 4:
        step = next((step * part for part in (0.5, 0.2) if (high - low) / (step * part) >= 4), step * 0.1)
    first = -(-low // step)
    return [
        round((first + number) * step, 10) for number in range(int((high - first * step) / step + 1e-9) + 1)
    ]
