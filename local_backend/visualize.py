"""Pictures of decoding: which tokens each forward landed, what was copied from where, what copying brings.

Matplotlib is imported when a picture is drawn, and only then needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

from local_backend.sequence import Completion

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

_ROW_INCHES = 0.55
# From one token a forward to many: the more a forward landed, the darker its block.
_PALE, _DARK = (0.83, 0.88, 0.93), (0.13, 0.40, 0.60)
_DARKEST_AT_TOKENS = 8
_REFERENCE_COLOURS = ("#cfe3f5", "#fbe0c4", "#d6edd0", "#f5d0d8", "#e2d8f0", "#f4efb8", "#cdeeea", "#e8dccf")


def landings(completions: Mapping[str, Completion], *, max_tokens: int | None = None) -> Figure:
    """Draw, for each way of decoding the same prompt, its tokens from left to right in blocks of one forward.

    Args:
        completions: By name, e.g. the drafter's.
        max_tokens: Only the first so many tokens.

    Returns:
        A matplotlib figure that is not registered with pyplot and so need not be closed.

    Raises:
        ValueError: There is no completion.
        ImportError: Matplotlib is not installed.
    """
    if not completions:
        raise ValueError("there is nothing to draw: give at least one completion")
    longest = max(len(completion.token_ids) for completion in completions.values())
    shown = min(longest, max_tokens or longest)

    figure = _figure(10, 0.9 + _ROW_INCHES * len(completions))
    axes = figure.add_subplot()
    for height, completion in enumerate(completions.values()):
        start = 0
        for landed in completion.stats.tokens_by_forward:
            width = min(landed, shown - start)
            if width <= 0:
                break
            axes.broken_barh([(start, width)], (height - 0.4, 0.8), color=_shade(landed), edgecolor="white")
            if width >= 3:
                axes.text(start + width / 2, height, str(landed), ha="center", va="center", color="white")
            start += landed
        stats = completion.stats
        summary = f"{stats.num_forwards} forwards, {stats.tokens_per_forward:.1f} tokens each"
        axes.text(shown * 1.01, height, summary, va="center", fontsize=9)
    axes.set_yticks(range(len(completions)), list(completions))
    axes.set_xlim(0, shown * 1.3)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= shown])
    axes.set_xlabel("token of the answer; one block is one forward")
    axes.invert_yaxis()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    return figure


def ablation(results: Mapping[str, Any], *, figure: str = "tokens_per_forward") -> Figure:
    """Draw what length of match and of copy bring, beside a drafter that chooses both for itself.

    Args:
        results: What ``python -m benchmarks.copy_ablation`` prints: ``n`` and ``k``, a table of each figure
            by both, and the figures of ``adaptive``.
        figure: ``"tokens_per_forward"`` or ``"milliseconds_per_token"``.

    Returns:
        A matplotlib figure, as of :func:`landings`.

    Raises:
        ValueError: There is no such figure in ``results``.
        ImportError: Matplotlib is not installed.
    """
    if figure not in results:
        raise ValueError(f"the results hold no {figure!r}; they hold {', '.join(sorted(results))}")
    picture = _figure(7, 3.6)
    axes = picture.add_subplot()
    for number, n in enumerate(results["n"]):
        shade = _shade(1 + round(_DARKEST_AT_TOKENS * (number + 1) / len(results["n"])))
        axes.plot(results["k"], results[figure][number], marker="o", color=shade, label=f"match of {n}")
    adaptive = results["adaptive"][figure]
    axes.axhline(adaptive, color="black", linestyle="--")
    axes.text(results["k"][0], adaptive, "reference copy", va="bottom", fontsize=9)
    axes.set_xlabel("tokens copied behind a match")
    axes.set_ylabel(figure.replace("_", " "))
    axes.set_xticks(results["k"])
    axes.legend(fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return picture


class CopiedText:
    """An answer in which what was copied has the colour of its reference; shows itself in Jupyter.

    Args:
        completion: Of a row with references.
        tokenizer: The engine's.
        min_tokens: Spans that are shorter are not coloured.
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


def _figure(width_inches: float, height_inches: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'langchain-parallel-decoding[notebooks]'"
        ) from error

    class Picture(Figure):
        """Shows itself in Jupyter, whether or not pyplot was ever imported."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=120)
            return picture.getvalue()

    return Picture(figsize=(width_inches, height_inches), layout="constrained")


def _shade(num_tokens: int) -> tuple[float, float, float]:
    part = min(num_tokens - 1, _DARKEST_AT_TOKENS) / _DARKEST_AT_TOKENS
    red, green, blue = (pale + (dark - pale) * part for pale, dark in zip(_PALE, _DARK, strict=True))
    return red, green, blue
