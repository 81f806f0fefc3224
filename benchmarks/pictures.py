"""Pictures of decoding: tokens emitted by each forward, and text copied from references.

Matplotlib is imported, and needed, only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from local_backend.sequences.outputs import Completion

if TYPE_CHECKING:
    from langchain_core.tracers.schemas import Run
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase


_ROW_INCHES = 0.55
# The more tokens a forward emitted, the darker its block.
_PALE, _DARK = (0.83, 0.88, 0.93), (0.13, 0.40, 0.60)
_TOOL_COLOUR = (0.80, 0.47, 0.13)
_DARKEST_AT_TOKENS = 8
_REFERENCE_COLOURS = ("#cfe3f5", "#fbe0c4", "#d6edd0", "#f5d0d8", "#e2d8f0", "#f4efb8", "#cdeeea", "#e8dccf")


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
        raise ImportError("pictures need matplotlib: pip install '.[notebooks]' in a checkout") from error

    class Picture(Figure):
        """Shows itself in Jupyter, whether or not pyplot was ever imported."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=120)
            return picture.getvalue()

    return Picture(layout="constrained", **options)


def landings(completions: Mapping[str, Completion]) -> Figure:
    """Draw the tokens of each completion of one prompt from left to right, one block per forward.

    Args:
        completions: By name, e.g. the drafter's.

    Returns:
        A matplotlib figure that is not registered with pyplot and so need not be closed.

    Raises:
        ValueError: There is no completion.
        ImportError: Matplotlib is not installed.
    """
    if not completions:
        raise ValueError("there is nothing to draw: give at least one completion")
    longest = max(len(completion.token_ids) for completion in completions.values())
    figure = new_figure(figsize=(10, 0.9 + _ROW_INCHES * len(completions)))
    axes = figure.add_subplot()
    for height, completion in enumerate(completions.values()):
        start = 0
        for landed in completion.stats.tokens_by_forward:
            axes.broken_barh([(start, landed)], (height - 0.4, 0.8), color=_shade(landed), edgecolor="white")
            if landed >= 3:
                axes.text(start + landed / 2, height, str(landed), ha="center", va="center", color="white")
            start += landed
        stats = completion.stats
        summary = f"{stats.num_forwards} forwards, {stats.tokens_per_forward:.1f} tokens each"
        axes.text(longest * 1.01, height, summary, va="center", fontsize=9)
    axes.set_yticks(range(len(completions)), list(completions))
    axes.set_xlim(0, longest * 1.3)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= longest])
    axes.set_xlabel("token of the answer; one block is one forward")
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def timelines(runs: Mapping[str, Run]) -> Figure:
    """Draw the model calls and tools of runs of LangChain over time, one above the other.

    Args:
        runs: By name; ``RunCollectorCallbackHandler`` of ``langchain_core.tracers.run_collector`` keeps them.

    Raises:
        ValueError: There is no run.
        ImportError: Matplotlib is not installed.
    """
    if not runs:
        raise ValueError("there is nothing to draw: give at least one run")
    calls = {title: _calls(run) for title, run in runs.items()}
    heights = [max(1, len(found)) for found in calls.values()]
    figure = new_figure(figsize=(10, 1.0 * len(runs) + 0.28 * sum(heights)))
    rows = figure.subplots(len(runs), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max((end for found in calls.values() for *_, end in found), default=1.0)
    for axes, (title, found) in zip(rows, calls.items(), strict=True):
        for height, (_, colour, start, end) in enumerate(found):
            axes.barh(height, max(end - start, longest / 300), left=start, color=colour)  # to be seen
        axes.set_xlim(0, longest * 1.02)
        axes.set_yticks(range(len(found)), [name for name, *_ in found])
        axes.set_title(title, loc="left", fontsize=10)
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    rows[-1].set_xlabel("seconds")
    return figure


def _calls(run: Run) -> list[tuple[str, Any, float, float]]:
    """Name, colour, begin and end of the model calls and tools below ``run``, in the order they began."""
    found: list[tuple[str, Any, float, float]] = []
    below = [run]
    while below:
        one = below.pop()
        below += one.child_runs
        if one.run_type in ("tool", "llm", "chat_model") and one.end_time:
            start, end = ((time - run.start_time).total_seconds() for time in (one.start_time, one.end_time))
            found.append((one.name, _TOOL_COLOUR if one.run_type == "tool" else _DARK, start, end))
    return sorted(found, key=itemgetter(2))


class CopiedText:
    """An answer with copied spans in the colour of their reference; shows itself in Jupyter.

    Args:
        completion: Of a row with references.
        tokenizer: The engine's.
        min_tokens: Shorter spans are not coloured.
    """

    def __init__(
        self, completion: Completion, tokenizer: PreTrainedTokenizerBase, *, min_tokens: int = 4
    ) -> None:
        self.spans = completion.copied_spans(min_tokens)
        self._pieces: list[tuple[str, int | None]] = []
        ids, place = completion.token_ids, 0
        for span in self.spans:
            self._add(tokenizer, ids[place : span.start], None)
            place = span.start + span.num_tokens
            self._add(tokenizer, ids[span.start : place], span.reference)
        self._add(tokenizer, ids[place:], None)

    def _add(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], reference: int | None) -> None:
        if ids:
            self._pieces.append((str(tokenizer.decode(list(ids), skip_special_tokens=True)), reference))

    def __str__(self) -> str:
        """For terminals: copied text in brackets with the number of its reference."""
        return "".join(
            text if reference is None else f"[{reference + 1}: {text}]" for text, reference in self._pieces
        )

    def _repr_html_(self) -> str:
        pieces = []
        for text, reference in self._pieces:
            shown = escape(text).replace("\n", "<br>")
            if reference is not None:
                colour = _REFERENCE_COLOURS[reference % len(_REFERENCE_COLOURS)]
                shown = f'<span style="background:{colour}" title="reference {reference + 1}">{shown}</span>'
            pieces.append(shown)
        return f'<div style="line-height:1.6;color:black;background:white">{"".join(pieces)}</div>'


def _shade(num_tokens: int) -> tuple[float, float, float]:
    part = min(num_tokens - 1, _DARKEST_AT_TOKENS) / _DARKEST_AT_TOKENS
    red, green, blue = (pale + (dark - pale) * part for pale, dark in zip(_PALE, _DARK, strict=True))
    return red, green, blue
