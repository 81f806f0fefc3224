"""The report: one self-contained HTML file.

Figures are inline SVG, a short script sorts the tables, and a content security policy blocks all requests.
Text from questions and models is escaped. The report contains no timestamp.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sot_chains.evaluation.answers import NAMES, Way
from sot_chains.evaluation.figures import Bar, Dot, bars, scatter, stacked
from sot_chains.evaluation.judge import ASPECTS, GENERAL
from sot_chains.evaluation.results import ALL, Evaluation, Judged, NetWinRate, WayFigures, median

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; margin: 2rem auto; max-width: 60rem; padding: 0
1rem } h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem } h3 { font-size: 1rem; margin:
1.4rem 0 .4rem } svg { width: 100%; height: auto; background: #fff } .scroll { overflow-x: auto } table {
border-collapse: collapse; font-size: 13px; width: 100% } th, td { border-bottom: 1px solid #e5e7eb;
padding: .3rem .5rem; text-align: left; vertical-align: top } td.number, th.number { text-align: right;
font-variant-numeric: tabular-nums; white-space: nowrap } th button { all: unset; cursor: pointer;
font-weight: 600 } th button:focus-visible { outline: 2px solid #2a78d6 } th[aria-sort=ascending]
button::after { content: " \\2191" } th[aria-sort=descending] button::after { content: " \\2193" } .warning
{ background: #fef3c7; padding: .5rem .8rem; border-radius: 4px }
"""
_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  const value = row => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const isNumber = head.classList.contains("number");
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (isNumber) {
      if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
      return (up ? 1 : -1) * (Number(x) - Number(y));
    }
    return (up ? 1 : -1) * x.localeCompare(y);
  });
  body.append(...rows);
});
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_Cell = str | float | int | None
_Row = dict[str, _Cell]


def html(evaluation: Evaluation) -> str:
    """The report as an HTML page."""
    models = list(evaluation.by_model)
    parts = [
        "<h1>Skeleton-of-Thought: speed and quality</h1>",
        _introduction(evaluation),
        "<h2>At a glance</h2>",
        _overview(evaluation),
    ]
    if evaluation.judge is not None:
        parts += ["<h2>The judge</h2>", _health(evaluation)]
    for model in models:
        parts.append(f"<h2>{escape(model)}</h2>")
        parts += _model(evaluation, model)
    if len(models) > 1:
        rows = [
            (model, [Bar(evaluation.figures(model, way).speed_up) for way in evaluation.ways])
            for model in models
        ]
        parts += [
            "<h2>Speed-up by model</h2>",
            bars(rows, _names(evaluation.ways), name="speed-up by model", base=1.0),
        ]
    parts += ["<h2>All questions</h2>", _questions(evaluation)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,"><title>Skeleton-of-Thought: speed and quality</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}<script>{_SCRIPT}</script></body></html>\n"
    )


def _introduction(evaluation: Evaluation) -> str:
    num_questions = max(len(judged) for judged in evaluation.by_model.values())
    judged_by = (
        f", judged by {escape(evaluation.judge)} in both orders" if evaluation.judge else ", not judged"
    )
    return (
        f"<p>{num_questions} questions, each answered plainly and by Skeleton-of-Thought (SoT), one after "
        f"another{judged_by}. SoT-R takes whichever of the two its router picks. Speed-up: plain seconds "
        "over the way's, median over questions. Net win rate: how much more often the way is preferred to "
        "plain than plain to it; brackets and whiskers are 95 % bootstrap intervals over questions.</p>"
    )


def _overview(evaluation: Evaluation) -> str:
    rows: list[_Row] = []
    for model, judged in evaluation.by_model.items():
        for way in evaluation.ways:
            figures = evaluation.figures(model, way)
            rows.append(
                {
                    "model": model,
                    "way": NAMES[way],
                    "by SoT": f"{figures.num_sot} of {figures.num_questions}",
                    "speed-up": figures.speed_up,
                    "of sums": figures.speed_up_of_sums,
                    "net win rate": _rate(figures.net_win_rates.get(GENERAL)),
                    "median s": figures.seconds,
                    "points": figures.num_points,
                    "words a point": figures.words_per_point,
                    "prompt tokens over plain": figures.prefill_overhead,
                    "failed": sum(not one.is_answered for one in judged),
                }
            )
    return _table(rows)


def _health(evaluation: Evaluation) -> str:
    health = evaluation.health
    failures = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in health.num_failures.items())
    num_failed = health.num_judgements - health.num_verdicts
    style = ' class="warning"' if num_failed else ""
    return (
        f"<p{style}>{health.num_judgements} judgements, {health.num_verdicts} verdicts; without one: "
        f"{failures}. "
        "Questions without a verdict in both orders are in no net win rate. "
        f"Position bias {100 * health.position_bias:+.0f} % (first minus second, among verdicts), "
        f"averaged out by judging both orders; the orders agree on {100 * health.agreement:.0f} % of "
        "pairs.</p>"
    )


def _model(evaluation: Evaluation, model: str) -> list[str]:
    ways, categories = evaluation.ways, evaluation.categories(model)
    by_category = {
        category: [evaluation.figures(model, way, category) for way in ways]
        for category in [ALL, *categories]
    }
    dots = [
        Dot(category, figures.speed_up, figures.net_win_rates[GENERAL].net, place)
        for category in categories
        for place, figures in enumerate(by_category[category])
        if GENERAL in figures.net_win_rates
    ]
    parts = []
    if dots:
        parts += [
            "<h3>Speed against quality, by category</h3>",
            scatter(dots, _names(ways), x_name="speed-up", y_name="net win rate, general"),
        ]
    speed = [
        (category, [Bar(figures.speed_up) if figures.num_questions else None for figures in row])
        for category, row in by_category.items()
    ]
    quality = [(category, _rate_bars(row, GENERAL)) for category, row in by_category.items()]
    aspects = [(aspect, _rate_bars(by_category[ALL], aspect)) for aspect in ASPECTS]
    parts += _bars("Speed-up, by category", speed, ways, base=1.0)
    parts += _bars("Net win rate, by category", quality, ways, is_share=True)
    parts += _bars("Net win rate, by aspect", aspects, ways, is_share=True)
    judged = evaluation.by_model[model]
    times = [row for category in categories for row in _times(judged, category)]
    parts += [
        "<h3>Where the time goes (medians)</h3>",
        stacked(times, ("skeleton", "points", "plain"), name="seconds by stage and category"),
        "<h3>In numbers</h3>",
        _category_table(ways, by_category),
    ]
    return parts


def _bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[Bar | None]]],
    ways: Sequence[Way],
    *,
    base: float = 0.0,
    is_share: bool = False,
) -> list[str]:
    """A titled chart with one bar per way; nothing if there is no bar."""
    if not any(bar for _, row in rows for bar in row):
        return []
    return [f"<h3>{title}</h3>", bars(rows, _names(ways), name=title, base=base, is_share=is_share)]


def _times(judged: Sequence[Judged], category: str) -> list[tuple[str, tuple[float, float, float]]]:
    usable = [one.answers.by_way for one in judged if one.category == category and one.is_answered]
    by_sot = [ways["sot"] for ways in usable if ways["sot"].route == "sot"]
    return [
        (f"{category}, plain", (0.0, 0.0, median([ways["plain"].seconds for ways in usable]))),
        (
            f"{category}, SoT",
            (median([r.skeleton_seconds for r in by_sot]), median([r.points_seconds for r in by_sot]), 0.0),
        ),
    ]


def _category_table(ways: Sequence[Way], by_category: dict[str, list[WayFigures]]) -> str:
    rows: list[_Row] = []
    for category, row in by_category.items():
        for way, figures in zip(ways, row, strict=True):
            rate = figures.net_win_rates.get(GENERAL)
            rows.append(
                {
                    "category": category,
                    "way": NAMES[way],
                    "questions": figures.num_questions,
                    "by SoT": figures.num_sot,
                    "speed-up": figures.speed_up,
                    "net win rate": _rate(rate),
                    "wins": rate.num_wins if rate else None,
                    "ties": rate.num_ties if rate else None,
                    "losses": rate.num_losses if rate else None,
                    "points": figures.num_points,
                    "words a point": figures.words_per_point,
                    "words": figures.words,
                    "words over plain": figures.words_over_plain,
                    "outline's share of time": figures.skeleton_share,
                    **figures.mistakes,
                    "plain looped": figures.plain_looped,
                }
            )
    return _table(rows)


def _questions(evaluation: Evaluation) -> str:
    ways: tuple[Way, ...] = ("plain", *evaluation.ways)
    rows: list[_Row] = []
    for model, judged in evaluation.by_model.items():
        for one in judged:
            records, route = one.answers.by_way, one.answers.route
            rows.append(
                {
                    "model": model,
                    "question": one.answers.question.text,
                    "category": one.category,
                    "router": f"{'SoT' if route.use_sot else 'plain'}: {route.reason}" if route else "",
                    **{f"{NAMES[way]}, s": records[way].seconds for way in ways},
                    "points": len(records["sot"].point_lengths),
                    "SoT against plain": one.score("sot", GENERAL),
                    "failed": one.answers.failure,
                }
            )
    return _table(rows)


def _table(rows: Sequence[_Row]) -> str:
    """A table whose heads are the keys of its rows; columns without text are sorted as numbers."""
    heads = list(rows[0])
    kinds = {
        head: "" if any(isinstance(row[head], str) for row in rows) else ' class="number"' for head in heads
    }
    head_cells = "".join(
        f'<th scope="col"{kinds[head]}><button type="button">{escape(head)}</button></th>' for head in heads
    )
    body = "".join(f"<tr>{''.join(_cell(row[head], kinds[head]) for head in heads)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head_cells}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(value: _Cell, kind: str) -> str:
    if isinstance(value, str) or value is None:
        shown = escape(value or "")
        return f'<td{kind} data-value="{escape(value or "", quote=True)}">{shown}</td>'
    return f'<td{kind} data-value="{value!r}">{value if isinstance(value, int) else f"{value:.2f}"}</td>'


def _rate(rate: NetWinRate | None) -> str:
    return f"{100 * rate.net:+.0f} % [{100 * rate.low:+.0f}, {100 * rate.high:+.0f}]" if rate else ""


def _rate_bars(row: Sequence[WayFigures], criterion: str) -> list[Bar | None]:
    rates = [figures.net_win_rates.get(criterion) for figures in row]
    return [Bar(rate.net, rate.low, rate.high) if rate else None for rate in rates]


def _names(ways: Sequence[Way]) -> list[str]:
    return [NAMES[way] for way in ways]
