"""The report's figures as inline SVG, drawn by matplotlib. Knows numbers and names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT, _GRID = "#374151", "#e5e7eb"
_WIDTH = 7.5  # inches


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
    figure, axes = _axes(4.4)
    for number, name in enumerate(series):
        of_one = [dot for dot in dots if dot.series == number]
        axes.scatter([dot.x for dot in of_one], [dot.y for dot in of_one], label=name, alpha=0.75)
    for dot in dots:
        axes.annotate(dot.name, (dot.x, dot.y), (5, -3), textcoords="offset points", parse_math=False)
    axes.axvline(1.0, color=_TEXT, linewidth=0.8)
    axes.axhline(0.0, color=_TEXT, linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.yaxis.set_major_formatter(lambda value, _: _label(value, is_share=True))
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    return _svg(figure, series, f"{y_name} against {x_name}")


def bars(
    rows: Sequence[tuple[str, Sequence[Bar | None]]],
    series: Sequence[str],
    *,
    name: str,
    base: float = 0.0,
    is_share: bool = False,
) -> str:
    """Horizontal bars drawn from ``base``; each row has one bar per series."""
    figure, axes = _axes(0.6 + len(rows) * (0.15 + 0.22 * len(series)))
    thickness = 0.8 / max(1, len(series))
    for number, label in enumerate(series):
        of_one = [(place, row[number]) for place, (_, row) in enumerate(rows)]
        shown = [(place + (number + 0.5) * thickness - 0.4, bar) for place, bar in of_one if bar is not None]
        places, values = [place for place, _ in shown], [bar.value for _, bar in shown]
        axes.barh(places, [value - base for value in values], thickness * 0.9, left=base, label=label)
        for place, bar in shown:
            if bar.low is not None and bar.high is not None:
                axes.plot([bar.low, bar.high], [place, place], color=_TEXT, linewidth=1)
            end = max(base, bar.value, bar.high if bar.high is not None else bar.value)
            axes.annotate(_label(bar.value, is_share), (end, place), (4, -3), textcoords="offset points")
    axes.axvline(base, color=_TEXT, linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: _label(value, is_share))
    _name_rows(axes, [label for label, _ in rows])
    return _svg(figure, series, name)


def stacked(rows: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], *, name: str) -> str:
    """Horizontal stacked bars of seconds, with one segment per series."""
    figure, axes = _axes(0.8 + 0.32 * len(rows))
    for number, label in enumerate(series):
        begins = [sum(row[:number]) for _, row in rows]
        axes.barh(range(len(rows)), [row[number] for _, row in rows], 0.7, left=begins, label=label)
    for place, (_, row) in enumerate(rows):
        axes.annotate(f"{sum(row):.2f} s", (sum(row), place), (4, -3), textcoords="offset points")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    _name_rows(axes, [label for label, _ in rows])
    return _svg(figure, series, name)


def _axes(height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the report's figures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(_WIDTH, height + 0.8), layout="constrained")
    axes = figure.subplots()
    axes.grid(color=_GRID)
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
    axes.locator_params(axis="x", nbins=7)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure, axes


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _svg(figure: Figure, series: Sequence[str], name: str) -> str:
    """The figure as an SVG element with text as text; the same for the same numbers."""
    import matplotlib

    figure.legend(loc="outside upper left", ncols=max(1, len(series)), frameon=False)
    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": name})
    element = file.getvalue()[file.getvalue().index("<svg") :]
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(name, quote=True)}"', 1).strip()


def _label(value: float, is_share: bool) -> str:
    return f"{100 * value:+.0f} %" if is_share else f"{value:.2f}x"
