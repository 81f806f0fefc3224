"""Pictures of consistency training: trajectories, and tokens per forward over training.

Matplotlib is imported when a picture is drawn, and only then needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from local_backend.training.examples import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTLED, _RIGHT, _WRONG, _NOT_YET = "#1f4e79", "#5fa8d3", "#e76f51", "#f4f1ec"


def new_figure(**options: Any) -> Figure:
    """A matplotlib figure that shows itself in Jupyter and is not registered with pyplot.

    Args:
        options: As for matplotlib's ``Figure``.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'langchain-parallel-decoding[training]'"
        ) from error

    class Picture(Figure):
        """Shows itself in Jupyter, whether or not pyplot was ever imported."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=110)
            return picture.getvalue()

    return Picture(layout="constrained", **options)


def trajectory_cells(trajectory: Trajectory) -> list[list[int]]:
    """For each forward (first axis) and place of the answer (second axis) how things stand.

    Returns:
        3 settled, 2 guessed right, 1 guessed wrong, 0 not guessed.
    """
    answer = trajectory.answer_ids
    rows = []
    for start, guess in zip(trajectory.starts, trajectory.iterates, strict=True):
        row = [3] * start + [0] * (len(answer) - start)
        for place, token in enumerate(guess[: len(answer) - start], start):
            row[place] = 2 if token == answer[place] else 1
        rows.append(row)
    return [*rows, [3] * len(answer)]


def draw_trajectories(trajectories: Mapping[str, Trajectory], *, max_tokens: int = 64) -> Figure:
    """Places across, iterations down: what was settled, guessed right and guessed wrong before each forward.

    Args:
        trajectories: By name, drawn side by side; e.g. of a plain and of a tuned model on one prompt.
        max_tokens: Only the first so many places.

    Returns:
        A matplotlib figure that is not registered with pyplot and so need not be closed.

    Raises:
        ValueError: There is no trajectory.
        ImportError: Matplotlib is not installed.
    """
    if not trajectories:
        raise ValueError("there is nothing to draw: give at least one trajectory")
    cells = {
        name: [row[:max_tokens] for row in trajectory_cells(trajectory) if row[:max_tokens]]
        for name, trajectory in trajectories.items()
    }
    for name, rows in cells.items():  # forwards behind the last place shown add nothing
        done = next((number for number, row in enumerate(rows) if set(row) <= {3}), len(rows) - 1)
        cells[name] = rows[: done + 1]
    tallest = max(map(len, cells.values()))
    figure = new_figure(figsize=(5.2 * len(cells), 1.4 + min(7.0, 0.13 * tallest)))
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ListedColormap([_NOT_YET, _WRONG, _RIGHT, _SETTLED])
    panels = figure.subplots(1, len(cells), squeeze=False, sharey=True)[0]
    for axes, (name, rows) in zip(panels, cells.items(), strict=True):
        axes.pcolormesh(rows, cmap=colours, vmin=0, vmax=3, edgecolors="white", linewidth=0.3)
        axes.set_title(f"{name}: {len(rows) - 1} forwards")
        axes.set_xlabel("token of the answer")
        axes.set_ylim(tallest, 0)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    panels[0].set_ylabel("forward")
    names = ((_SETTLED, "settled"), (_RIGHT, "guessed right"), (_WRONG, "guessed wrong"))
    figure.legend(
        handles=[Patch(color=colour, label=label) for colour, label in names],
        loc="outside lower center",
        ncols=len(names),
        frameon=False,
    )
    return figure


def draw_progress(history: Sequence[Mapping[str, float]]) -> Figure:
    """Tokens per forward, and beside it quality, over the steps of training.

    Args:
        history: Records with ``step``, ``tokens_per_forward`` and, where it was reckoned, ``quality``.

    Returns:
        A matplotlib figure that is not registered with pyplot.

    Raises:
        ValueError: There is no record.
        ImportError: Matplotlib is not installed.
    """
    if not history:
        raise ValueError("there is nothing to draw: nothing was measured during training")
    figure = new_figure(figsize=(7, 3.2))
    axes = figure.add_subplot()
    steps = [record["step"] for record in history]
    axes.plot(steps, [record["tokens_per_forward"] for record in history], color=_SETTLED, marker="o")
    axes.set_xlabel("step")
    axes.set_ylabel("tokens per forward", color=_SETTLED)
    axes.set_ylim(bottom=0)
    axes.spines["top"].set_visible(False)
    judged = [(record["step"], record["quality"]) for record in history if record.get("quality") is not None]
    if judged:
        beside = axes.twinx()
        beside.plot(*zip(*judged, strict=True), color=_WRONG, marker="s", linestyle="--")
        beside.set_ylabel("quality", color=_WRONG)
        beside.set_ylim(0, 1.02 if max(value for _, value in judged) <= 1 else None)
        beside.spines["top"].set_visible(False)
    return figure
