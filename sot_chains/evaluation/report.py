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
from sot_chains.evaluation.mistakes import MISTAKES
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
    rows: list[list[_Cell]] = []
    for model, judged in evaluation.by_model.items():
        for way in evaluation.ways:
            figures = evaluation.figures(model, way)
            rows.append(
                [
                    model,
                    NAMES[way],
                    f"{figures.num_sot} of {figures.num_questions}",
                    figures.speed_up,
                    figures.speed_up_of_sums,
                    _rate(figures.net_win_rates.get(GENERAL)),
                    figures.seconds,
                    figures.num_points,
                    figures.words_per_point,
                    figures.prefill_overhead,
                    sum(not one.is_answered for one in judged),
                ]
            )
    heads = (
        *(
            "model",
            "way",
            "by SoT",
            "speed-up",
            "of sums",
            "net win rate",
            "median s",
            "points",
            "words a point",
        ),
        *("prompt tokens over plain", "failed"),
    )
    return _table(heads, rows, text_columns=(0, 1, 2, 5))


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
    parts = []
    dots = [
        Dot(category, figures.speed_up, figures.net_win_rates[GENERAL].net, place)
        for category in categories
        for place, figures in enumerate(by_category[category])
        if GENERAL in figures.net_win_rates
    ]
    if dots:
        parts += [
            "<h3>Speed against quality, by category</h3>",
            scatter(dots, _names(ways), x_name="speed-up", y_name="net win rate, general"),
        ]
    speed = [
        (category, [Bar(figures.speed_up) if figures.num_questions else None for figures in row])
        for category, row in by_category.items()
    ]
    parts += [
        "<h3>Speed-up, by category</h3>",
        bars(speed, _names(ways), name="speed-up by category", base=1.0),
    ]
    if dots:
        quality = [
            (category, [_bar(figures.net_win_rates.get(GENERAL)) for figures in row])
            for category, row in by_category.items()
        ]
        parts += [
            "<h3>Net win rate, by category</h3>",
            bars(quality, _names(ways), name="net win rate by category", is_share=True),
        ]
    aspects = [
        (aspect, [_bar(figures.net_win_rates.get(aspect)) for figures in by_category[ALL]])
        for aspect in ASPECTS
    ]
    if any(bar for _, row in aspects for bar in row):
        parts += [
            "<h3>Net win rate, by aspect</h3>",
            bars(aspects, _names(ways), name="net win rate by aspect", is_share=True),
        ]
    judged = evaluation.by_model[model]
    times = [row for category in categories for row in _times(judged, category)]
    parts += [
        "<h3>Where the time goes (medians)</h3>",
        stacked(times, ("skeleton", "points", "plain"), name="seconds by stage and category"),
        "<h3>In numbers</h3>",
        _category_table(ways, by_category),
    ]
    return parts


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
    heads = (
        *("category", "way", "questions", "by SoT", "speed-up", "net win rate", "wins", "ties", "losses"),
        *("points", "words a point", "words", "words over plain", "outline's share of time"),
        *(*MISTAKES, "plain looped"),
    )
    rows: list[list[_Cell]] = []
    for category, row in by_category.items():
        for way, figures in zip(ways, row, strict=True):
            rate = figures.net_win_rates.get(GENERAL)
            rows.append(
                [
                    category,
                    NAMES[way],
                    figures.num_questions,
                    figures.num_sot,
                    figures.speed_up,
                    _rate(rate),
                    *((rate.num_wins, rate.num_ties, rate.num_losses) if rate else (None, None, None)),
                    figures.num_points,
                    figures.words_per_point,
                    figures.words,
                    figures.words_over_plain,
                    figures.skeleton_share,
                    *(figures.mistakes[name] for name in MISTAKES),
                    figures.plain_looped,
                ]
            )
    return _table(heads, rows, text_columns=(0, 1, 5))


def _questions(evaluation: Evaluation) -> str:
    ways: tuple[Way, ...] = ("plain", *evaluation.ways)
    heads = ["model", "question", "category", "router", *(f"{NAMES[way]}, s" for way in ways)]
    heads += ["points", "SoT against plain", "failed"]
    rows: list[list[_Cell]] = []
    for model, judged in evaluation.by_model.items():
        for one in judged:
            records, route = one.answers.by_way, one.answers.route
            rows.append(
                [
                    model,
                    one.answers.question.text,
                    one.category,
                    "" if route is None else f"{'SoT' if route.use_sot else 'plain'}: {route.reason}",
                    *(records[way].seconds for way in ways),
                    len(records["sot"].point_lengths),
                    one.score("sot", GENERAL),
                    "; ".join(record.reason for record in records.values() if record.has_failed),
                ]
            )
    return _table(heads, rows, text_columns=(0, 1, 2, 3, len(heads) - 1))


def _table(heads: Sequence[str], rows: Sequence[Sequence[_Cell]], *, text_columns: Sequence[int]) -> str:
    def kind(column: int) -> str:
        return "" if column in text_columns else ' class="number"'

    head = "".join(
        f'<th scope="col"{kind(column)}><button type="button">{escape(name)}</button></th>'
        for column, name in enumerate(heads)
    )
    body = "".join(
        "<tr>" + "".join(_cell(value, kind(column)) for column, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: _Cell, kind: str) -> str:
    if isinstance(value, str) or value is None:
        shown = escape(value or "")
        return f'<td{kind} data-value="{escape(value or "", quote=True)}">{shown}</td>'
    return f'<td{kind} data-value="{value!r}">{value if isinstance(value, int) else f"{value:.2f}"}</td>'


def _rate(rate: NetWinRate | None) -> str:
    return f"{100 * rate.net:+.0f} % [{100 * rate.low:+.0f}, {100 * rate.high:+.0f}]" if rate else ""


def _bar(rate: NetWinRate | None) -> Bar | None:
    return Bar(rate.net, rate.low, rate.high) if rate else None


def _names(ways: Sequence[Way]) -> list[str]:
    return [NAMES[way] for way in ways]
