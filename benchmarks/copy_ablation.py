"""The LLMA paper's ablation (arXiv 2304.04487): how long a match must be, and how much to copy after it.

A model with random weights is forced to generate the same answers with ``SpanCopy`` for every n (tokens that
must match) and k (tokens copied), and with ``reference_copy``, which chooses at every step. Reports forwards
and seconds of decoding; ``draw`` plots them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.copy_speed import Contest
from benchmarks.copy_workloads import SHAPES, forced_tasks, random_llama
from benchmarks.peers import Run, Task, aside, run_engine
from benchmarks.pictures import new_figure
from benchmarks.results import save
from benchmarks.span_copy import SpanCopy
from local_backend import ChatLocal, Drafter
from local_backend.drafting import make_drafter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATCHES, COPIES = (1, 2, 3, 4, 5), (5, 10, 15, 20, 25, 30)


def figures(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens per forward and milliseconds per token, over all answers."""
    num_tokens = sum(len(ids) for run in runs for ids in run.token_ids)
    return {
        "tokens_per_forward": round(num_tokens / sum(run.num_forwards for run in runs), 3),
        "milliseconds_per_token": round(1e3 * statistics.mean(run.seconds_per_token for run in runs), 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copy_ablation", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="100m", help="size of the random model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--n", type=int, nargs="+", default=MATCHES)
    parser.add_argument("--k", type=int, nargs="+", default=COPIES)
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    with aside(ChatLocal.default) as chat, Progress(console=Console(stderr=True)) as progress:
        tokenizer = chat.engine.tokenizer
        tasks = [[task] for task in forced_tasks(tokenizer, options.cases, seed=2)]
        model = aside(lambda: random_llama(options.shape, max(32_000, len(tokenizer)), options.device))

        def run(make: Callable[[], Drafter], batch: Sequence[Task]) -> Run:
            return run_engine(model, tokenizer, batch, make())

        ways: dict[str, Callable[[Sequence[Task]], Run]] = {
            f"n={n} k={k}": partial(run, partial(SpanCopy, n, k)) for n in options.n for k in options.k
        }
        for name in ("autoregressive", "reference_copy"):
            ways[name] = partial(run, partial(make_drafter, name))
        medians = Contest(ways, tasks, options.repeats).hold(progress, "n x k")
    cells = {name: figures(runs) for name, runs in medians.items()}
    results: dict[str, Any] = {
        "n": list(options.n),
        "k": list(options.k),
        **{
            figure: [[cells[f"n={n} k={k}"][figure] for k in options.k] for n in options.n]
            for figure in ("tokens_per_forward", "milliseconds_per_token")
        },
        "adaptive": cells["reference_copy"],
        "autoregressive": cells["autoregressive"],
    }
    table = Table("n", *(f"k = {k}" for k in options.k), title="tokens per forward / ms per token")
    for n in options.n:
        table.add_row(str(n), *(_cell(cells[f"n={n} k={k}"]) for k in options.k))
    table.add_row("reference_copy", _cell(cells["reference_copy"]))
    table.add_row("autoregressive", _cell(cells["autoregressive"]))
    Console(width=110).print(table)
    if options.save:
        save(f"copy_ablation_{options.shape}", results, [])
    print(json.dumps(results))


def _cell(cell: dict[str, float]) -> str:
    return f"{cell['tokens_per_forward']:.2f} / {cell['milliseconds_per_token']:.1f}"


def draw(results: Mapping[str, Any], *, figure: str = "tokens_per_forward") -> Figure:
    """Draw the effect of match length and copy length, beside a drafter that adapts both.

    Args:
        results: What the command prints: ``n`` and ``k``, a table of each figure by both, and the figures of
            ``adaptive``.
        figure: ``"tokens_per_forward"`` or ``"milliseconds_per_token"``.

    Returns:
        A matplotlib figure that is not registered with pyplot and so need not be closed.

    Raises:
        ValueError: There is no such figure in ``results``.
        ImportError: Matplotlib is not installed.
    """
    if figure not in results:
        raise ValueError(f"the results hold no {figure!r}; they hold {', '.join(sorted(results))}")
    picture = new_figure(figsize=(7, 3.6))
    axes = picture.add_subplot()
    for number, n in enumerate(results["n"]):
        shade = str(0.8 - 0.8 * number / len(results["n"]))  # grey, the darker the longer the match
        axes.plot(results["k"], results[figure][number], marker="o", color=shade, label=f"match of {n}")
    adaptive = results["adaptive"][figure]
    axes.axhline(adaptive, color="tab:blue", linestyle="--")
    axes.text(results["k"][0], adaptive, "reference copy", va="bottom", fontsize=9)
    axes.set_xlabel("tokens copied behind a match")
    axes.set_ylabel(figure.replace("_", " "))
    axes.set_xticks(results["k"])
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return picture


if __name__ == "__main__":
    main()
