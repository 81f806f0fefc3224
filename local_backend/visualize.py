"""Pictures of decoding: which tokens each forward landed.

Matplotlib is imported when a picture is drawn, and only then needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING

from local_backend.sequence import Completion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW_INCHES = 0.55
# From one token a forward to many: the more a forward landed, the darker its block.
_PALE, _DARK = (0.83, 0.88, 0.93), (0.13, 0.40, 0.60)
_DARKEST_AT_TOKENS = 8


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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'langchain-parallel-decoding[notebooks]'"
        ) from error
    longest = max(len(completion.token_ids) for completion in completions.values())
    shown = min(longest, max_tokens or longest)

    class Landings(Figure):
        """Shows itself in Jupyter, whether or not pyplot was ever imported."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=120)
            return picture.getvalue()

    figure = Landings(figsize=(10, 0.9 + _ROW_INCHES * len(completions)), layout="constrained")
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


def _shade(num_tokens: int) -> tuple[float, float, float]:
    part = min(num_tokens - 1, _DARKEST_AT_TOKENS) / _DARKEST_AT_TOKENS
    red, green, blue = (pale + (dark - pale) * part for pale, dark in zip(_PALE, _DARK, strict=True))
    return red, green, blue
