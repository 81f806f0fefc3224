"""Questions about a database and the SQL that answers them, scored by executing it on SQLite.

The databases of the test split are never seen in training. In training, most table and column names are
replaced by other words of the same vocabulary, so that a small model learns to take them from the prompt.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from benchmarks.jacobi_tasks.base import Case, Split, word_list

_TEST_EVERY = 4
_MAX_STEPS = 200_000  # steps of SQLite's virtual machine per query
_VALUES = word_list("""
    Oslo Lima Cairo Quito Turin Porto Nantes Leeds Ghent Basel Malmo Bergen Zagreb Tartu Vilnius
    Cork Anna Bruno Clara Dario Elena Felix Greta Hugo Irma Jonas Karin Leo Marta Nils Olga Paul
    Rosa Stefan red blue green amber silver copper maple cedar birch granite marble linen velvet
    barley clover spring summer autumn winter morning evening harbour meadow river stone storm cloud
    ember frost
""")
_KEYWORDS = {"id", "order", "group", "limit", "table", "index", "set", "check", "by", "to"}
_OTHER_NAME_SHARE = 0.7
_ALL_COLUMNS_SHARE = 0.4


@dataclass(frozen=True)
class Table:
    """A table: its name, text columns and whole-number columns, in the order written."""

    name: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class Schema:
    """Two tables; the second has a column that refers to the first by its id."""

    first: Table
    second: Table

    @property
    def reference(self) -> str:
        """The column of the second table that holds ids of the first."""
        return f"{self.first.name}_id"

    def columns(self, table: Table) -> list[str]:
        """All columns in the order of the database."""
        keys = ["id"] if table is self.first else ["id", self.reference]
        return [*keys, *table.texts, *table.numbers]


@cache
def schemas(split: Split) -> tuple[Schema, ...]:
    """The databases of a split."""
    lines = files(__package__).joinpath("schemas.txt").read_text("utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    kept = [
        line
        for number, line in enumerate(lines)
        if (number % _TEST_EVERY == _TEST_EVERY - 1) == (split == "test")
    ]
    return tuple(Schema(*map(_parse_table, line.split("|"))) for line in kept)


def _parse_table(text: str) -> Table:
    name, _, columns = text.strip().partition(":")
    names = [column.strip() for column in columns.split(",")]
    return Table(
        name,
        tuple(column for column in names if not column.endswith("#")),
        tuple(column[:-1] for column in names if column.endswith("#")),
    )


class TextToSql:
    """Text-to-SQL over two tables: filters, aggregates, groups, orders, joins and subqueries."""

    name = "text_to_sql"

    def make(self, rng: random.Random, split: Split) -> Case | None:
        """A question about one of the split's databases."""
        schema = rng.choice(schemas(split))
        if split == "train":
            schema = _renamed(schema, rng)
        rows = {table.name: _rows(schema, table, rng) for table in (schema.first, schema.second)}
        question, sql = _Writer(schema, rows, rng).write()
        described = "\n".join(
            f"table {table.name} ({', '.join(schema.columns(table))})"
            for table in (schema.first, schema.second)
        )
        tables = {
            table.name: {"columns": schema.columns(table), "rows": rows[table.name]}
            for table in (schema.first, schema.second)
        }
        case = Case(f"{described}\n{question}\n", sql, {"tables": tables, "sql": sql})
        # An answer that returns no rows must not count as correct.
        return case if split == "train" or _run(case.facts, sql) else None

    def score(self, cases: Sequence[Case], texts: Sequence[str]) -> list[bool]:
        """Whether each answer, run on the case's database, returns the same rows as the correct query."""
        return [is_right(case.facts, text) for case, text in zip(cases, texts, strict=True)]


def is_right(facts: Mapping[str, Any], sql: str) -> bool:
    """Run both queries; rows must match, in order if the correct query orders them."""
    right, got = _run(facts, facts["sql"]), _run(facts, sql)
    if got is not None and "ORDER BY" not in facts["sql"]:
        return sorted(right or (), key=repr) == sorted(got, key=repr)
    return right == got


def _run(facts: Mapping[str, Any], sql: str) -> list[Any] | None:
    """Rows of a query on the case's database; ``None`` if it fails, selects nothing or takes too long."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for name, table in facts["tables"].items():
            connection.execute(f"CREATE TABLE {name} ({', '.join(table['columns'])})")
            marks = ", ".join("?" * len(table["columns"]))
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", table["rows"])
        connection.set_authorizer(_only_reading)
        turns = iter(range(_MAX_STEPS // 1000))
        connection.set_progress_handler(lambda: next(turns, None) is None, 1000)
        try:
            cursor = connection.execute(sql.strip())
            return cursor.fetchall() if cursor.description else None
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            return None


def _only_reading(action: int, *_: object) -> int:
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY


def _renamed(schema: Schema, rng: random.Random) -> Schema:
    """The schema with most names replaced by other words, so that they cannot be memorised."""
    used: set[str] = {"id"}

    def rename(name: str) -> str:
        candidate = name
        while candidate in used or (candidate == name and rng.random() < _OTHER_NAME_SHARE):
            candidate = rng.choice(_words())
        used.add(candidate)
        return candidate

    first, second = (
        Table(
            rename(table.name),
            tuple(rename(column) for column in _some_of(table.texts, rng)),
            tuple(rename(column) for column in _some_of(table.numbers, rng)),
        )
        for table in (schema.first, schema.second)
    )
    return Schema(first, second)


def _some_of(columns: tuple[str, ...], rng: random.Random) -> list[str]:
    """All columns or a random subset: a few columns are easier to look up and are learned first."""
    if rng.random() < _ALL_COLUMNS_SHARE:
        return list(columns)
    return rng.sample(columns, rng.randrange(1, len(columns) + 1))


@cache
def _words() -> tuple[str, ...]:
    """The words names are made of."""
    names = (
        name
        for split in ("train", "test")
        for schema in schemas(split)
        for table in (schema.first, schema.second)
        for name in (table.name, *table.texts, *table.numbers)
    )
    return tuple(sorted({word for name in names for word in name.split("_")} - _KEYWORDS))


def _rows(schema: Schema, table: Table, rng: random.Random) -> list[list[Any]]:
    count = rng.randrange(14, 22)
    values = {column: rng.sample(_VALUES, 5) for column in table.texts}
    # No number occurs twice in a column, so an order, a maximum or a limit has one correct answer.
    numbers = {column: rng.sample(range(2, 100), count) for column in table.numbers}
    rows: list[list[Any]] = []
    for place in range(count):
        keys = [place + 1] if table is schema.first else [place + 1, rng.randrange(1, 15)]
        texts = [rng.choice(values[column]) for column in table.texts]
        rows.append([*keys, *texts, *(numbers[column][place] for column in table.numbers)])
    return rows


_COMPARISONS = (
    (">", ("greater than", "above", "more than")),
    ("<", ("less than", "below", "under")),
    (">=", ("at least",)),
    ("<=", ("at most",)),
)
_AGGREGATES = (
    ("AVG", ("average", "mean")),
    ("SUM", ("total", "sum of")),
    ("MAX", ("highest", "largest")),
    ("MIN", ("lowest", "smallest")),
)


class _Writer:
    """Writes one question and its query over a database."""

    def __init__(self, schema: Schema, rows: dict[str, list[list[Any]]], rng: random.Random) -> None:
        self.schema, self.rng = schema, rng
        self.table = rng.choice((schema.first, schema.first, schema.second))
        self._rows = rows

    def write(self) -> tuple[str, str]:
        forms = (
            (self._listing, 4),
            (self._count, 2),
            (self._aggregate, 2),
            (self._group, 3),
            (self._extreme, 2),
            (self._against_average, 2),
            (self._join, 3),
        )
        form = self.rng.choices([form for form, _ in forms], [weight for _, weight in forms])[0]
        return form()

    # Pieces --------------------------------------------------------------------------------------

    def _values(self, table: Table, column: str) -> list[Any]:
        place = self.schema.columns(table).index(column)
        return [row[place] for row in self._rows[table.name]]

    def _condition(self, table: Table, column: str) -> tuple[str, str]:
        rng, spoken = self.rng, column
        values = self._values(table, column)
        if column in table.texts:
            value = rng.choice(values)
            if rng.random() < 0.15:
                return f"{spoken} is not '{value}'", f"{column} <> '{value}'"
            return f"{spoken} is '{value}'", f"{column} = '{value}'"
        low, high = sorted(values)[len(values) // 4], sorted(values)[3 * len(values) // 4]
        if rng.random() < 0.2:
            return f"{spoken} is between {low} and {high}", f"{column} BETWEEN {low} AND {high}"
        sign, words = rng.choice(_COMPARISONS)
        value = rng.choice((low, high, rng.randrange(low, high + 1)))
        return f"{spoken} is {rng.choice(words)} {value}", f"{column} {sign} {value}"

    def _where(self, *, least: int = 0, most: int = 3) -> tuple[str, str]:
        """Words and clause, each with a space before it, or empty."""
        columns = [*self.table.texts, *self.table.numbers]
        columns = self.rng.sample(columns, min(len(columns), self.rng.randrange(least, most + 1)))
        if not columns:
            return "", ""
        joint = "AND" if self.rng.random() < 0.75 else "OR"
        pairs = [self._condition(self.table, column) for column in columns]
        words = f" {joint.lower()} ".join(words for words, _ in pairs)
        return f" whose {words}", " WHERE " + f" {joint} ".join(clause for _, clause in pairs)

    def _some(self, columns: Sequence[str], most: int) -> list[str]:
        return self.rng.sample(list(columns), min(len(columns), self.rng.randrange(1, most + 1)))

    # Forms ---------------------------------------------------------------------------------------

    def _listing(self) -> tuple[str, str]:
        rng, table = self.rng, self.table
        columns = self._some([*table.texts, *table.numbers], 4)
        words, clause = self._where()
        spoken = " and ".join(columns)
        opening = rng.choice(("Show the", "List the", "What are the", "Give me the"))
        question, sql = (
            f"{opening} {spoken} of every {table.name}{words}",
            f"SELECT {', '.join(columns)} FROM {table.name}{clause}",
        )
        if rng.random() < 0.6:
            column = rng.choice(table.numbers)
            down = rng.random() < 0.5
            limit = rng.randrange(2, 7) if rng.random() < 0.5 else None
            word = rng.choice(("highest", "largest") if down else ("lowest", "smallest"))
            question += f", {word} {column} first"
            sql += f" ORDER BY {column} {'DESC' if down else 'ASC'}"
            if limit:
                question += f", only {limit}"
                sql += f" LIMIT {limit}"
        return question + ".", sql + ";"

    def _count(self) -> tuple[str, str]:
        words, clause = self._where(least=1)
        opening = self.rng.choice(("How many are the", "Count the", "What is the number of"))
        return (
            f"{opening} {self.table.name} rows{words}?",
            f"SELECT COUNT( * ) FROM {self.table.name}{clause};",
        )

    def _aggregate(self) -> tuple[str, str]:
        rng, table = self.rng, self.table
        column = rng.choice(table.numbers)
        function, names = rng.choice(_AGGREGATES)
        words, clause = self._where(least=1)
        return (
            f"What is the {rng.choice(names)} {column} of every {table.name}{words}?",
            f"SELECT {function}( {column} ) FROM {table.name}{clause};",
        )

    def _group(self) -> tuple[str, str]:
        rng, table = self.rng, self.table
        by = rng.choice(table.texts)
        if rng.random() < 0.4:
            value, spoken = "COUNT( * )", "number of rows"
        else:
            column = rng.choice(table.numbers)
            function, names = rng.choice(_AGGREGATES)
            value, spoken = f"{function}( {column} )", f"{rng.choice(names)} {column}"
        words, clause = self._where(most=2)
        question = f"For each {by} of {table.name}{words}, what is the {spoken}"
        sql = f"SELECT {by}, {value} FROM {table.name}{clause} GROUP BY {by}"
        if rng.random() < 0.4:
            least = rng.randrange(1, 4)
            question += f", where there are more than {least} rows"
            sql += f" HAVING COUNT( * ) > {least}"
        sql += f" ORDER BY {by} ASC"
        return f"{question}, in order of {by}?", sql + ";"

    def _extreme(self) -> tuple[str, str]:
        rng, table = self.rng, self.table
        column = rng.choice(table.numbers)
        shown = self._some([name for name in (*table.texts, *table.numbers) if name != column], 2)
        function, names = rng.choice(_AGGREGATES[2:])
        return (
            f"Which {' and '.join(shown)} has the {table.name} with the {rng.choice(names)} {column}?",
            f"SELECT {', '.join(shown)} FROM {table.name} "
            f"WHERE {column} = ( SELECT {function}( {column} ) FROM {table.name} );",
        )

    def _against_average(self) -> tuple[str, str]:
        rng, table = self.rng, self.table
        column = rng.choice(table.numbers)
        shown = self._some([name for name in (*table.texts, *table.numbers) if name != column], 2)
        above = rng.random() < 0.5
        return (
            f"Show the {' and '.join(shown)} of every {table.name} "
            f"whose {column} is {'above' if above else 'below'} average.",
            f"SELECT {', '.join(shown)} FROM {table.name} WHERE {column} {'>' if above else '<'} "
            f"( SELECT AVG( {column} ) FROM {table.name} );",
        )

    def _join(self) -> tuple[str, str]:
        rng, schema = self.rng, self.schema
        one, two = schema.first, schema.second
        left, right = rng.choice((*one.texts, *one.numbers)), rng.choice((*two.texts, *two.numbers))
        table = rng.choice((one, two))
        words, clause = self._condition(table, rng.choice((*table.texts, *table.numbers)))
        return (
            f"Show the {left} of each {one.name} with the {right} of its {two.name}, "
            f"where the {table.name} {words}.",
            f"SELECT {left}, {right} FROM {one.name} JOIN {two.name} "
            f"ON {schema.reference} = {one.name}.id WHERE {clause};",
        )
