"""Tasks: right answers score, wrong ones do not, what is held out is never trained on, code is contained."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.jacobi_tasks import TASKS, Case, Split, Task, draw_cases
from benchmarks.jacobi_tasks.__main__ import main
from benchmarks.jacobi_tasks.python_functions import run_tests
from benchmarks.jacobi_tasks.recipes import RECIPES
from benchmarks.jacobi_tasks.text_to_sql import is_right, schemas
from benchmarks.jacobi_tasks.word_problems import number_of


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]


def _cases(task: Task, split: Split, count: int, seed: int = 0) -> list[Case]:
    return list(islice(draw_cases(task, split, seed=seed), count))


def test_right_answers_score_and_others_do_not(task: Task) -> None:
    cases = _cases(task, "test", 20)
    assert all(task.score(cases, [case.answer for case in cases]))
    assert not any(task.score(cases, [""] * len(cases)))
    # The answer to another question is right by chance at most.
    assert sum(task.score(cases, [case.answer for case in (*cases[1:], cases[0])])) <= 2
    assert not any(task.score(cases, [case.answer[: len(case.answer) // 3] for case in cases]))


def test_cases_are_the_same_for_the_same_seed_and_never_twice(task: Task) -> None:
    cases = _cases(task, "train", 200)
    assert cases == _cases(task, "train", 200)
    assert len({case.prompt for case in cases}) == 200
    assert cases != _cases(task, "train", 200, seed=1)


def test_what_is_held_out_is_not_trained_on(task: Task) -> None:
    train = {case.prompt for seed in (0, 1) for case in _cases(task, "train", 500, seed)}
    assert not train & {case.prompt for case in _cases(task, "test", 300)}


def test_every_task_has_a_recipe() -> None:
    assert set(RECIPES) == set(TASKS)


def test_there_are_many_schemas_and_those_for_testing_are_others() -> None:
    train, test = schemas("train"), schemas("test")
    assert len(train) + len(test) >= 40
    assert len(test) >= 10
    assert not {schema.first.name for schema in train} & {schema.first.name for schema in test}
    for schema in (*train, *test):
        names = [
            schema.reference,
            *(c for table in (schema.first, schema.second) for c in (*table.texts, *table.numbers)),
        ]
        assert len(names) == len(set(names)), f"{schema.first.name}: columns need no table's name before them"
    tested = {case.prompt.split()[1] for case in _cases(TASKS["text_to_sql"], "test", 300)}
    assert tested <= {schema.first.name for schema in test}


FACTS = {
    "tables": {"t": {"columns": ["id", "a"], "rows": [[1, 5], [2, 9], [3, 7]]}},
    "sql": "SELECT a FROM t WHERE a > 5 ORDER BY a ASC;",
}


def test_sql_is_judged_by_its_rows() -> None:
    assert is_right(FACTS, "SELECT a FROM t WHERE a >= 7 ORDER BY a;")
    assert not is_right(FACTS, "SELECT a FROM t WHERE a > 5 ORDER BY a DESC;")  # another order
    assert not is_right(FACTS, "SELECT id FROM t WHERE a > 5 ORDER BY a ASC;")
    unordered = {**FACTS, "sql": "SELECT a FROM t WHERE a > 5;"}
    assert is_right(unordered, "SELECT a FROM t WHERE a > 5 ORDER BY a DESC;")


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "SELECT",
        "nonsense",
        "SELECT b FROM t;",
        "DROP TABLE t;",
        "INSERT INTO t VALUES (4, 4);",
        "ATTACH DATABASE 'x.db' AS x;",
        "PRAGMA writable_schema = 1;",
        "SELECT a FROM t; SELECT a FROM t;",
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT SUM(n) FROM r;",
        "\x00",
    ],
)
def test_sql_that_fails_writes_or_never_ends_is_wrong(sql: str, tmp_path: Path) -> None:
    assert not is_right(FACTS, sql)
    assert not list(tmp_path.iterdir())


@given(st.text(max_size=60))
def test_scores_of_any_text_are_told(text: str) -> None:
    assert not is_right(FACTS, text)
    assert number_of(text) is None or "answer is" in text


TESTS = {"function": "f", "tests": [[[1, 2], 3], [[], 0]]}


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("return sum(values)", "passed"),
        ("return 3", "failed"),
        ("return sum(values) + 0.0", "failed"),  # another type
        ("return sum(values", "failed"),
        ("raise SystemExit(0)", "failed"),
        ("import os; os._exit(0)", "failed"),
        ("print('passed'); raise SystemExit(0)", "failed"),
        ("return [0] * 10**10", "failed"),
        ("while True: pass", "timeout"),
    ],
)
def test_functions_are_judged_by_their_tests(body: str, verdict: str) -> None:
    assert run_tests(f"def f(values):\n    {body}\n", TESTS, time_limit_seconds=2) == verdict


def test_numbers_are_read_from_the_end() -> None:
    assert number_of("The answer is 4. No: the answer is 12.") == 12
    assert number_of("4 + 8 = 12") is None


def test_the_command_shows_cases(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "text_to_sql", "--cases", "2"])
    assert capsys.readouterr().out.count("SELECT") >= 2
