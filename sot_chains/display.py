"""Plain decoding and Skeleton-of-Thought side by side in a terminal, and an answer shown in a notebook.

The two run one after the other, since together they would slow each other down. A terminal shows both as they
grow; a file or a pipe gets them in reading order, without control characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Any, TypeAlias

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import Runnable
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from sot_chains.chain import SkeletonOfThought
from sot_chains.outline.skeleton import Point
from sot_chains.providers import Provider
from sot_chains.providers.errors import Retries
from sot_chains.rendering import Run, make_lane

_PLAIN, _SOT = "Plain decoding", "Skeleton-of-Thought"
_COLORS = {_PLAIN: "blue", _SOT: "green"}
_FRAMES_PER_SECOND = 12
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})
_Texts: TypeAlias = dict[str, dict[Point | None, str]]  # of each point so far, by title; None: a plain answer


async def compare(
    model: SkeletonOfThought | Runnable[Any, Any] | Provider | str,
    question: str,
    *,
    console: Console,
    plain: bool = True,
) -> tuple[AIMessage | None, AIMessage]:
    """Answers ``question`` plainly and by Skeleton-of-Thought and shows both, then a table."""
    sot = model if isinstance(model, SkeletonOfThought) else SkeletonOfThought(model)
    once, profile = Retries(max_attempts=1), sot.options.profile
    plain_chain = SkeletonOfThought(sot.provider, router="never", profile=profile, retries=once)
    chains = {_PLAIN: plain_chain, _SOT: sot} if plain else {_SOT: sot}
    console.print(Text(f"Question: {printable(question)}", style="bold"))
    texts: _Texts = {title: {} for title in chains}
    runs: dict[str, AIMessage] = {}
    frame = partial(_board, texts)
    live = Live(console=console, refresh_per_second=_FRAMES_PER_SECOND, transient=True, get_renderable=frame)
    with live if console.is_terminal else nullcontext():
        for title, chain in chains.items():
            so_far = texts[title]
            if not console.is_terminal:
                runs[title] = await _write(console, title, chain, question)
            else:
                async with aclosing(chain.astream_points(question)) as stream:
                    async for point, text in stream:
                        so_far[point] = so_far.get(point, "") + text
                runs[title] = stream.message
    if console.is_terminal:
        console.print(_board(texts))
    console.print(_table(runs))
    trace = runs[_SOT].response_metadata["sot"]
    route = "answered plainly" if trace["route"] == "plain" else "Skeleton-of-Thought"
    console.print(Text(f"Model: {sot.provider.model_name}. Route: {route}; {trace['route_reason']}."))
    cost: Any = trace["cost"]
    if plainly := cost["plain_price"]:
        paid, uncached = cost["price"] / plainly, cost["uncached_price"] / plainly
        over = f"{paid:.2f} times a plain answer, without a cache {uncached:.2f} times"
        console.print(f"Price: {cost['price']:.6f}, {over}.")
    return runs.get(_PLAIN), runs[_SOT]


async def _write(console: Console, title: str, chain: SkeletonOfThought, question: str) -> AIMessage:
    console.print(Text(f"\n{title}\n{'-' * len(title)}"))
    message = AIMessageChunk(content="")
    async for chunk in chain.astream(question):
        console.file.write(printable(chunk.text))  # Jupyter would give each print a line of its own
        console.file.flush()
        message += chunk
    console.print("\n")
    return message


def _board(texts: _Texts) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    panels = []
    for title, of_one in texts.items():
        grid.add_column(ratio=1)
        points = []
        for point, text in list(of_one.items()):  # a copy: rich draws frames on its own thread
            heading = f"{point.number}. {point.text}" + (": " if text else "") if point else ""
            points.append(Text(printable(heading), style="bold").append(printable(text), style="not bold"))
        panels.append(Panel(Group(*points), title=title, border_style=_COLORS[title]))
    grid.add_row(*panels)
    return grid


def _table(runs: Mapping[str, AIMessage]) -> Table:
    names = ("seconds", "tokens", "first text", "critical path", "speed-up")
    numbers = (Column(name, justify="right", no_wrap=True) for name in names)
    table = Table(Column(no_wrap=True), *numbers)
    # Two plain answers are the same, so that a speed-up of one would be noise.
    is_plain = runs[_SOT].response_metadata["sot"]["route"] == "plain"
    plain = None if is_plain or _PLAIN not in runs else runs[_PLAIN].response_metadata["sot"]["seconds"]
    for title, message in runs.items():
        trace, usage = message.response_metadata["sot"], message.usage_metadata
        speed_up = plain / trace["seconds"] if plain and trace["seconds"] else None
        table.add_row(
            title,
            f"{trace['seconds']:.2f}",
            str(usage["output_tokens"]) if usage else "-",
            "-" if (first := trace["first_text_seconds"]) is None else f"{first:.2f} s",
            f"{trace['critical_path_seconds']:.2f} s",
            f"{speed_up:.2f}x" if speed_up else "-",
        )
    return table


def printable(text: str) -> str:
    """``text`` without control characters: a model's answer must not steer the terminal."""
    return text.translate(_CONTROLS)


def shown(message: AIMessage, question: str = "") -> Run:
    """An answer as the page of ``sot serve`` shows it: points, timeline and figures. Jupyter displays it."""
    if "sot" not in message.response_metadata:
        raise ValueError(
            'the message has no response_metadata["sot"]: expected an answer of SkeletonOfThought '
            "(in a stream the last chunk has it, and the sum of all chunks)"
        )
    model = str(message.response_metadata.get("model_name", ""))
    return Run(question, model, (make_lane("sot", _SOT, message),))
