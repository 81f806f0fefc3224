"""Plots of scheduling: which rows are in which forward, and predicted against actual lengths.

Needs matplotlib, from the ``notebooks`` extra. Knows replays and predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.length_errors import LengthErrors
from benchmarks.paper_scheduling.replay import Replay, Stay
from benchmarks.pictures import new_figure
from local_backend.scheduling.lengths import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WRITES, _REFILL, _GOES_ON = "#1f4e79", "#5fa8d3", "#7fb069"
_PADDING, _ASIDE = "#ece5db", "#e76f51"
_COLOURS = {
    "decodes": _WRITES,
    "decodes in a refilled slot": _REFILL,
    "resumed or restarted": _GOES_ON,
    "padding": _PADDING,
    "preempted": _ASIDE,
}


def schedule_bars(replay: Replay) -> dict[str, list[tuple[int, int, int]]]:
    """The bars of a replay by kind: slot, first forward and number of forwards of each bar.

    The kinds are those of the legend. The last forwards of a preempted row are marked.
    """
    bars: dict[str, list[tuple[int, int, int]]] = {name: [] for name in _COLOURS}
    mark = max(1, replay.num_forwards // 150)
    again: set[int] = set()
    for stay in replay.stays:
        written = stay.num_tokens
        if stay.end == "preempted":
            marked = min(mark, written)
            bars["preempted"].append((stay.place, stay.start + written - marked, marked))
            written -= marked
        if written:
            bars[_kind(stay, is_again=stay.row in again)].append((stay.place, stay.start, written))
        if stay.num_padding:
            bars["padding"].append((stay.place, stay.start + stay.num_tokens, stay.num_padding))
        if stay.end == "preempted":
            again.add(stay.row)
    return bars


def _kind(stay: Stay, *, is_again: bool) -> str:
    if is_again:
        return "resumed or restarted"
    return "decodes in a refilled slot" if stay.is_refill else "decodes"


def draw_schedules(replays: Mapping[str, Replay]) -> Figure:
    """Draw rows of the batch against forwards, one panel for each policy, all on the same scale.

    Args:
        replays: Replays by name.

    Returns:
        A matplotlib figure that is not registered with pyplot and so need not be closed.

    Raises:
        ValueError: There is no replay.
        ImportError: Matplotlib is not installed.
    """
    if not replays:
        raise ValueError("there is nothing to draw: give at least one replay")
    places = [1 + max((stay.place for stay in replay.stays), default=0) for replay in replays.values()]
    figure = new_figure(figsize=(10, 0.8 + sum(0.55 + 0.055 * number for number in places)))
    from matplotlib.patches import Patch

    panels = figure.subplots(
        len(replays),
        1,
        squeeze=False,
        sharex=True,
        gridspec_kw={"height_ratios": [0.3 + 0.055 * number for number in places]},
    )[:, 0]
    for axes, number, (name, replay) in zip(panels, places, replays.items(), strict=True):
        for kind, bars in schedule_bars(replay).items():
            axes.barh(
                [place for place, _, _ in bars],
                [width for _, _, width in bars],
                left=[first for _, first, _ in bars],
                height=0.86,
                color=_COLOURS[kind],
                edgecolor="white",  # separates rows in the same slot
                linewidth=0.4,
            )
        axes.set_ylim(number - 0.5, -0.5)
        axes.set_yticks([])
        axes.set_title(f"{name}: {replay.num_forwards} forwards", loc="left", fontsize="medium")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=2)
    panels[-1].set_xlabel("forward")
    figure.supylabel("row of the batch", fontsize="medium")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in _COLOURS.items()],
        loc="outside lower center",
        ncols=len(_COLOURS),
        frameon=False,
        fontsize="small",
    )
    return figure


def draw_predictions(predictions: Sequence[Prediction], num_tokens: Sequence[int]) -> Figure:
    """Draw actual against predicted lengths, each with a line up to its predicted maximum.

    Args:
        predictions: One for each answer.
        num_tokens: The actual lengths.

    Returns:
        A matplotlib figure that is not registered with pyplot.

    Raises:
        ValueError: The lists are empty or differ in length.
        ImportError: Matplotlib is not installed.
    """
    errors = LengthErrors.of(predictions, num_tokens)
    figure = new_figure(figsize=(5.4, 4.6))
    axes = figure.add_subplot()
    expected = [prediction.num_tokens for prediction in predictions]
    maxima = [prediction.max_num_tokens for prediction in predictions]
    top = 1.05 * max(*maxima, *num_tokens)
    axes.plot([0, top], [0, top], color=_PADDING, linewidth=2, zorder=0)
    axes.vlines(expected, expected, maxima, color=_PADDING, linewidth=1.2, zorder=1)
    is_within = [actual <= most for actual, most in zip(num_tokens, maxima, strict=True)]
    for wanted, colour, name in ((True, _WRITES, "within the maximum"), (False, _ASIDE, "longer")):
        chosen = [place for place, within in enumerate(is_within) if within is wanted]
        axes.scatter(
            [expected[place] for place in chosen],
            [num_tokens[place] for place in chosen],
            s=16,
            color=colour,
            label=name,
        )
    axes.set_xlabel("predicted tokens, with a line up to the maximum")
    axes.set_ylabel("actual tokens")
    axes.set_title(
        f"mean error {errors.mean_absolute_error:.0f} tokens, Acc-50 {errors.acc_50:.2f}, "
        f"Acc-100 {errors.acc_100:.2f}",
        fontsize="medium",
    )
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
