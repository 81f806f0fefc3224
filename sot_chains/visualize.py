"""A picture of how an answer came about: skeleton and points as bars over time.

Matplotlib is imported when a picture is drawn, and only then needed.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from langchain_core.messages import AIMessage

from sot_chains.trace import CallTrace, SotTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WAITING, _SKELETON, _POINT = "#d5d8dd", "#4c6a92", "#5a9e6f"
_BAR_INCHES = 0.42
_LONGEST_LABEL = 38


def timeline(message: AIMessage) -> Figure:
    """Draws when each model call of ``message`` began, first wrote, and ended.

    The grey part of a bar is the wait for its first text. In Jupyter the figure shows itself.

    Args:
        message: An answer of ``SkeletonOfThought``.

    Returns:
        A figure of matplotlib's, which is not registered with pyplot and so need not be closed.

    Raises:
        ValueError: The message carries no trace.
        ImportError: Matplotlib is not installed.
    """
    trace: SotTrace | None = message.response_metadata.get("sot")
    if trace is None:
        raise ValueError(
            'the message has no response_metadata["sot"]: expected an answer of SkeletonOfThought '
            "(in a stream the last chunk has it, and the sum of all chunks)"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing a timeline needs matplotlib: pip install 'langchain-parallel-decoding[notebooks]'"
        ) from error

    class Timeline(Figure):
        """Shows itself in Jupyter, also where pyplot was never imported."""

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
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, (trace["seconds"] or 1) * 1.1)
    axes.set_xlabel("seconds")
    axes.set_title(
        f"{trace['seconds']:.2f} s in all; skeleton and longest point {trace['critical_path_seconds']:.2f} s",
        loc="left",
        fontsize=10,
    )
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.tick_params(left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def _rows(trace: SotTrace) -> list[tuple[str, CallTrace, str]]:
    rows: list[tuple[str, CallTrace, str]] = []
    if trace["skeleton_call"]:
        rows.append(("skeleton", trace["skeleton_call"], _SKELETON))
    for point in trace["points"]:
        label = f"{point['number']}. {point['label']}"
        shortened = label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"
        rows.append((shortened.replace("$", r"\$"), point, _POINT))  # "$" would begin a formula
    if trace["plain_call"]:
        rows.append(("plain answer", trace["plain_call"], _POINT))
    return rows
