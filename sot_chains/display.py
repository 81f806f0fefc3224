"""Plain decoding and Skeleton-of-Thought side by side in a terminal, on the same question.

The two run one after the other, since together they would slow each other down. A terminal shows both
answers as they grow; a file or a pipe gets the finished answers, without control characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sot_chains.calls.retries import Retries
from sot_chains.calls.trace import CallTrace, SotTrace
from sot_chains.chain import SkeletonOfThought
from sot_chains.outline.skeleton import Point
from sot_chains.providers import Provider
from sot_chains.rendering import Run, lane_of
from sot_chains.router.rules import PLAINLY

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_PLAIN, _SOT = "Plain decoding", "Skeleton-of-Thought"
_COLORS = {_PLAIN: "blue", _SOT: "green"}
_FRAMES_PER_SECOND = 12


@dataclass(frozen=True)
class Measured:
    """Measurements of one answer.

    Attributes:
        text: The answer.
        seconds: From the request to the last character.
        first_text_seconds: From the request to the first character of the answer, if there was one.
        critical_path_seconds: The skeleton plus the longest point; for plain decoding, the whole answer.
        num_tokens: Output tokens of all calls; ``None`` if the model does not count them.
        num_forwards: Forward passes of the model; 0 if they are not counted.
        route: ``"plain"``, or the route that Skeleton-of-Thought took.
        route_reason: Why Skeleton-of-Thought took it.
    """

    text: str
    seconds: float
    first_text_seconds: float | None
    critical_path_seconds: float
    num_tokens: int | None
    num_forwards: int | None
    route: str
    route_reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """Both answers to one question. ``plain`` is ``None`` if plain decoding was skipped."""

    question: str
    plain: Measured | None
    sot: Measured

    @property
    def speedup(self) -> float | None:
        """How many times faster Skeleton-of-Thought was."""
        return self.plain.seconds / self.sot.seconds if self.plain and self.sot.seconds else None


async def compare(
    model: SkeletonOfThought | Runnable[Any, Any] | Provider | str,
    question: str,
    *,
    console: Console,
    forwards: Callable[[], int] | None = None,
    plain: bool = True,
) -> Comparison:
    """Answers ``question`` plainly and by Skeleton-of-Thought and shows both, then a table.

    Args:
        model: A ``SkeletonOfThought``, or a model to make one from.
        question: The question.
        console: Where to show the answers.
        forwards: Returns the number of forward passes the model has made so far.
        plain: Whether to run plain decoding at all.

    Raises:
        ValueError: The question is empty.
        ProviderError: A model call failed.
    """
    sot = model if isinstance(model, SkeletonOfThought) else SkeletonOfThought(model)
    once = Retries(max_attempts=1)
    plain_chain = SkeletonOfThought(sot.provider, router=PLAINLY, loop_guard=False, retries=once)
    chains = {_PLAIN: plain_chain, _SOT: sot} if plain else {_SOT: sot}
    count = forwards or (lambda: 0)
    console.print(Text(f"Question: {printable(question)}", style="bold"))
    board = _Board(chains)
    live = Live(board, console=console, refresh_per_second=_FRAMES_PER_SECOND, transient=True)
    with live if console.is_terminal else nullcontext():
        measured = {
            title: await _run(chain, question, board.texts[title], count) for title, chain in chains.items()
        }
    if console.is_terminal:
        console.print(board)
    else:
        for title, answer in measured.items():
            console.print(Text(f"\n{title}\n{'-' * len(title)}\n{printable(answer.text)}"))
        console.print()
    comparison = Comparison(question, measured.get(_PLAIN), measured[_SOT])
    console.print(_table(comparison, counted=forwards is not None))
    route = "answered plainly" if comparison.sot.route == "plain" else "Skeleton-of-Thought"
    console.print(Text(f"Route: {route}; {comparison.sot.route_reason}."))
    return comparison


async def _run(
    chain: SkeletonOfThought, question: str, texts: dict[Point | None, str], forwards: Callable[[], int]
) -> Measured:
    """Answers ``question``; ``texts`` takes the text of each point as it comes."""
    forwards_before = forwards()
    async with aclosing(chain.astream_points(question)) as stream:
        async for point, text in stream:
            texts[point] = texts.get(point, "") + text
    message = stream.message
    trace = message.response_metadata["sot"]
    return Measured(
        text=message.text,
        seconds=trace["seconds"],
        first_text_seconds=trace["first_text_seconds"],
        critical_path_seconds=trace["critical_path_seconds"],
        num_tokens=message.usage_metadata["output_tokens"] if message.usage_metadata else None,
        num_forwards=forwards() - forwards_before,
        route=trace["route"],
        route_reason=trace["route_reason"],
    )


class _Board:
    """The panels on the screen, side by side; rendered again for each frame.

    Attributes:
        texts: The text of each point so far, by the panel's title; a plain answer is all of one point.
    """

    def __init__(self, titles: Iterable[str]) -> None:
        self.texts: dict[str, dict[Point | None, str]] = {title: {} for title in titles}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(expand=True, padding=(0, 1))
        for _ in self.texts:
            grid.add_column(ratio=1)
        panels = (
            Panel(_written(texts), title=title, border_style=_COLORS[title])
            for title, texts in self.texts.items()
        )
        grid.add_row(*panels)
        yield grid


def _written(texts: dict[Point | None, str]) -> Group:
    points = []
    for point, text in list(texts.items()):  # a copy: rich draws frames on its own thread
        heading = f"{point.number}. {point.text}" + (": " if text else "") if point else ""
        points.append(Text(printable(heading), style="bold").append(printable(text), style="not bold"))
    return Group(*points)


def _table(comparison: Comparison, *, counted: bool) -> Table:
    table = Table(title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("seconds", "tokens", "forwards", "first text", "critical path", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, measured in ((_PLAIN, comparison.plain), (_SOT, comparison.sot)):
        if measured is None:
            continue
        speedup = comparison.speedup if title == _SOT else 1.0
        table.add_row(
            title,
            f"{measured.seconds:.2f}",
            "-" if measured.num_tokens is None else str(measured.num_tokens),
            str(measured.num_forwards) if counted else "-",
            "-" if measured.first_text_seconds is None else f"{measured.first_text_seconds:.2f} s",
            f"{measured.critical_path_seconds:.2f} s",
            "-" if speedup is None else f"{speedup:.2f}x",
        )
    return table


def printable(text: str) -> str:
    """``text`` without control characters: a model's answer must not steer the terminal."""
    return "".join(
        character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc"
    )


_WAITING, _SKELETON, _POINT = "#d5d8dd", "#4c6a92", "#5a9e6f"
_BAR_INCHES = 0.42
_LONGEST_LABEL = 38


def timeline(message: AIMessage) -> Figure:
    """Draws the start, first text and end of each model call of ``message``.

    The grey part of a bar is the wait for its first text. Grey lines lead from points to those that build on
    them. Jupyter displays the figure.

    Args:
        message: An answer of ``SkeletonOfThought``.

    Returns:
        A matplotlib figure; it is not registered with pyplot, so it need not be closed.

    Raises:
        ValueError: The message carries no trace.
        ImportError: Matplotlib is not installed.
    """
    trace = _trace_of(message)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing a timeline needs matplotlib: pip install '.[notebooks]' in a checkout"
        ) from error

    class Timeline(Figure):
        """Displays itself in Jupyter even if pyplot was never imported."""

        def _repr_png_(self) -> bytes:
            image = BytesIO()
            self.savefig(image, format="png", dpi=120, bbox_inches="tight")
            return image.getvalue()

    rows = _rows(trace)
    figure = Timeline(figsize=(9, 1.3 + _BAR_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, (_, call, color) in enumerate(rows):
        start, end = call["start_seconds"], call["end_seconds"]
        first_text = end if call["first_text_seconds"] is None else call["first_text_seconds"]
        axes.barh(place, first_text - start, left=start, height=0.62, color=_WAITING)
        axes.barh(place, end - first_text, left=first_text, height=0.62, color=color)
        axes.annotate(
            f" {end - start:.2f} s", (end, place), va="center", fontsize=8, color="#444444", clip_on=False
        )
    places, points = {id(call): place for place, (_, call, _) in enumerate(rows)}, trace["points"]
    for point in points:
        for needed in (points[need - 1] for need in point.get("needs", ()) if need <= len(points)):
            across = needed["end_seconds"], point["start_seconds"]
            axes.plot(across, (places[id(needed)], places[id(point)]), color=_WAITING, linewidth=1, zorder=0)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, (trace["seconds"] or 1) * 1.1)
    axes.set_xlabel("seconds")
    longest = "longest chain of points" if trace["route"] == "graph" else "longest point"
    axes.set_title(
        f"{trace['seconds']:.2f} s in all; skeleton and {longest} {trace['critical_path_seconds']:.2f} s",
        loc="left",
        fontsize=10,
    )
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.tick_params(left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def _trace_of(message: AIMessage) -> SotTrace:
    trace: SotTrace | None = message.response_metadata.get("sot")
    if trace is None:
        raise ValueError(
            'the message has no response_metadata["sot"]: expected an answer of SkeletonOfThought '
            "(in a stream the last chunk has it, and the sum of all chunks)"
        )
    return trace


def _rows(trace: SotTrace) -> list[tuple[str, CallTrace, str]]:
    rows: list[tuple[str, CallTrace, str]] = []
    if trace["skeleton_call"]:
        rows.append(("skeleton", trace["skeleton_call"], _SKELETON))
    for point in trace["points"]:
        label = f"{point['number']}. {point['label']}"
        shortened = label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"
        if needs := point.get("needs"):
            shortened += f" (after {', '.join(map(str, needs))})"
        rows.append((shortened.replace("$", r"\$"), point, _POINT))  # "$" would start a formula
    if conclusion := trace.get("conclusion"):
        rows.append(("conclusion", conclusion, _POINT))
    if trace["plain_call"]:
        rows.append(("plain answer", trace["plain_call"], _POINT))
    return rows


def shown(message: AIMessage, question: str = "") -> Run:
    """An answer as the page of ``sot serve`` shows it: points, timeline and figures. Jupyter displays it.

    Args:
        message: An answer of ``SkeletonOfThought``.
        question: The question, to be shown above it.

    Raises:
        ValueError: The message carries no trace.
    """
    _trace_of(message)
    model = str(message.response_metadata.get("model_name", ""))
    return Run(question, model, (lane_of("sot", _SOT, message),))
