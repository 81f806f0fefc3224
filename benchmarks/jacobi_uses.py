"""Three uses with predictable answers, made by generators: text to JSON, quoting, SQL for given tables.

The held-out part shares no names, no wordings and no tables with the part that is trained on: each list of
names, sentences and tables below is split, and every case draws from its part alone. A request is a chat with
one demonstration as earlier turns, and comes with the text that its answer may copy from.

Knows neither models nor training.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

from benchmarks.jacobi_tasks.base import Case, Task, draw_cases, word_list
from benchmarks.jacobi_tasks.text_to_sql import schemas

Split = Literal["train", "held_out"]
T = TypeVar("T")
_HELD_OUT_EVERY = 4
_TASK_TOKENS = 64  # of an answer
_MAX_STEPS = 200_000  # steps of SQLite's virtual machine per query

_FIRST = word_list("""
    Maria James Olivia Liam Noah Emma Ava Sophia Lucas Mia Ethan Amelia Harper Elijah Logan Aiden Grace Chloe
    Daniel Henry Leo Nora Ruby Owen Caleb Isaac Hannah Julia Peter Alice Victor Clara Simon Laura Oscar Diana
    Felix Irene Hugo Marta Paul Vera Carlos Elena Omar Fatima Yusuf Aisha Kenji Yuki Raj Priya Ivan Olga
""")
_LAST = word_list("""
    Smith Lopez Johnson Brown Garcia Miller Davis Wilson Moore Taylor Anderson Thomas Jackson White Harris
    Martin Thompson Young Walker Hall Allen King Wright Scott Green Baker Adams Nelson Hill Ramirez Campbell
    Mitchell Roberts Carter Phillips Evans Turner Torres Parker Collins Edwards Stewart Flores Morris Nguyen
    Murphy Rivera Cook Rogers Morgan Peterson Cooper Reed Bailey Bell Gomez Kelly Howard Ward Cox Diaz
""")
_CITIES = word_list("""
    Denver Boston Chicago Seattle Austin Dallas Phoenix Portland Atlanta Miami Detroit Houston Memphis Tucson
    Fresno Omaha Oakland Tulsa Tampa Cleveland Anaheim Madison Orlando Toledo Lincoln Buffalo Reno Paris
    London Berlin Madrid Rome Vienna Dublin Oslo Lisbon Prague Toronto Sydney Tokyo Mumbai Cairo Lima
""")
_THINGS = tuple(
    name.replace("_", " ")
    for name in word_list("""
        garden_chairs desk_lamps coffee_mugs running_shoes winter_coats wool_blankets picture_frames
        phone_cases wooden_tables leather_wallets paint_brushes steel_knives water_bottles yoga_mats
        bath_towels baking_trays tennis_rackets guitar_strings notebooks backpacks headphones
        keyboards monitors light_bulbs flower_pots bicycle_tires bird_feeders candles umbrellas
        sunglasses hammers ladders paper_bags soup_bowls door_handles wall_clocks floor_rugs pillows
        curtains skateboards fishing_rods camping_tents sleeping_bags travel_mugs
    """)
)
_COLORS = word_list("red blue green black white gray brown yellow purple orange silver pink")
_DAYS = word_list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_NUMBERS = word_list("2 3 4 5 6 7 8 9 10 12 15 20 24 25 30 36 40 48 50 60")
_ORDERS = (
    "{customer} from {city} wants {quantity} {color} {item} delivered on {day}.",
    "{customer} ({city}) ordered {quantity} {color} {item}. They should arrive on {day}.",
    "On {day}, {customer} of {city} needs {quantity} {color} {item}.",
    "A delivery of {quantity} {color} {item} goes to {customer}, {city}, this {day}.",
    "{customer} in {city} asks for {quantity} {color} {item}, to be delivered on {day}.",
    "{customer}, who lives in {city}, bought {quantity} {color} {item} for {day}.",
    "For {day}: {quantity} {color} {item} to {customer} in {city}.",
    "Please send {quantity} {color} {item} to {customer} in {city} by {day}.",
)
_FACTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # sentences and questions
    "opened": (
        ("It opened in {year} after {few} years of work.", "The first visitors came in {year}.",
         "Its doors have been open since {year}.", "People were first let in during {year}."),
        ("When did the {place} open?", "In which year did the {place} open?",
         "Since when is the {place} open?", "What year saw the opening of the {place}?"),
    ),
    "founder": (
        ("{person} paid for the building and ran it for {few} years.", "The idea came from {person}.",
         "It was founded by {person}, who had been a teacher.", "{person} set it up with {few} friends."),
        ("Who founded the {place}?", "Who had the idea for the {place}?",
         "Who started the {place}?", "Whose work was the founding of the {place}?"),
    ),
    "visitors": (
        ("About {many} people come every month.", "It counts {many} guests in a good summer.",
         "On busy days it sells {many} tickets.", "Last year it welcomed {many} visitors."),
        ("How many people visit the {place}?", "How many visitors does the {place} have?",
         "How many guests come to the {place}?", "What is the number of visitors of the {place}?"),
    ),
    "price": (
        ("A ticket costs {few} dollars, and children pay half.", "Entry is {few} dollars for adults.",
         "Adults pay {few} dollars at the gate.", "One pays {few} dollars to get in."),
        ("What does a ticket for the {place} cost?", "How much is the entry to the {place}?",
         "What do adults pay at the {place}?", "What is the price of getting into the {place}?"),
    ),
    "rooms": (
        ("There are {few} rooms on two floors.", "The house has {few} halls and a garden.",
         "Its {few} galleries lie around a yard.", "Inside one walks through {few} large rooms."),
        ("How many rooms does the {place} have?", "How large is the {place}?",
         "How many halls are there in the {place}?", "What is the size of the {place}?"),
    ),
}  # fmt: skip
_PLACES = tuple(
    f"{city} {kind}"
    for city in _CITIES
    for kind in ("Museum", "Aquarium", "Observatory", "Library", "Theatre")
)
_QUESTIONS: tuple[tuple[str, ...], ...] = (  # of one query each; the last wording is held out
    ("How many {table}s are there?", "Count the {table}s.", "How many {table}s do we have?",
     "What is the number of {table}s?"),
    ("What is the {text} of the {table} with the highest {number}?",
     "Give the {text} of the {table} whose {number} is the largest.",
     "Which {text} has the {table} with the most {number}?",
     "Find the {text} where the {table}'s {number} is at its top."),
    ("List the {text} of every {table} with a {number} above {value}.",
     "Which {text} do {table}s with more than {value} {number} have?",
     "Show the {text} of {table}s whose {number} is over {value}.",
     "For {table}s beyond a {number} of {value}, what is the {text}?"),
    ("What is the average {number} of all {table}s?", "Give the mean {number} of the {table}s.",
     "How large is the {number} of a {table} on average?", "Compute the typical {number} over {table}s."),
    ("How many {table}s are there for each {text}?", "Count the {table}s by {text}.",
     "Give every {text} with its number of {table}s.", "Per {text}, what is the tally of {table}s?"),
)  # fmt: skip
_QUERIES = (
    "SELECT COUNT(*) FROM {table};",
    "SELECT {text} FROM {table} ORDER BY {number} DESC LIMIT 1;",
    "SELECT {text} FROM {table} WHERE {number} > {value};",
    "SELECT AVG({number}) FROM {table};",
    "SELECT {text}, COUNT(*) FROM {table} GROUP BY {text};",
)


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        messages: The chat: a demonstration as two turns, then the request.
        answer: A right answer.
        source: Text that the answer may be copied from.
        facts: What the score of a task's case needs.
    """

    messages: tuple[dict[str, str], ...]  # none for a model that knows but one task, and continues its source
    answer: str
    source: str
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def record(self) -> dict[str, Any]:
        """As ``tune`` and ``collect`` read it."""
        return {"messages": list(self.messages)} if self.messages else {"prompt": self.source}


def part_of(pool: Sequence[T], split: Split) -> list[T]:
    """The names, wordings or tables that a split draws from: every fourth is held out."""
    return [
        each
        for number, each in enumerate(pool)
        if (number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1) == (split == "held_out")
    ]


def _json_case(rng: random.Random, split: Split) -> tuple[str, str]:
    fields = {
        "customer": f"{rng.choice(part_of(_FIRST, split))} {rng.choice(part_of(_LAST, split))}",
        "city": rng.choice(part_of(_CITIES, split)),
        "quantity": rng.choice(_NUMBERS),
        "color": rng.choice(_COLORS),
        "item": rng.choice(part_of(_THINGS, split)),
        "day": rng.choice(_DAYS),
    }
    text = rng.choice(part_of(_ORDERS, split)).format(**fields)
    schema = ", ".join(f'"{name}": string' for name in fields)
    return f"Write the order as JSON, {{{schema}}}.\nOrder: {text}", json.dumps(fields)


def _quote_case(rng: random.Random, split: Split) -> tuple[str, str]:
    place = rng.choice(part_of(_PLACES, split))

    def values() -> dict[str, Any]:
        return {
            "year": rng.randrange(1850, 2020),
            "few": rng.randrange(3, 30),
            "many": f"{rng.randrange(2, 90)},{rng.randrange(1000):03}",
            "person": f"{rng.choice(part_of(_FIRST, split))} {rng.choice(part_of(_LAST, split))}",
        }

    sentences = {
        kind: rng.choice(part_of(wordings, split)).format(**values())
        for kind, (wordings, _) in _FACTS.items()
    }
    order = rng.sample(list(sentences), len(sentences))
    asked = rng.choice(order)
    question = rng.choice(part_of(_FACTS[asked][1], split)).format(place=place)
    passage = f"This is the {place}. " + " ".join(sentences[kind] for kind in order)
    return f"{passage}\n\nQuote the sentence that answers the question: {question}", sentences[asked]


def _sql_case(rng: random.Random, split: Split) -> tuple[str, str]:
    schema = rng.choice(schemas("train" if split == "train" else "test"))
    table = rng.choice((schema.first, schema.second))
    kind = rng.randrange(len(_QUERIES))
    names = {
        "table": table.name,
        "text": rng.choice(table.texts),
        "number": rng.choice(table.numbers),
        "value": rng.randrange(5, 95),
    }
    tables = "\n".join(
        f"{each.name}({', '.join(schema.columns(each))})" for each in (schema.first, schema.second)
    )
    question = rng.choice(part_of(_QUESTIONS[kind], split)).format(**names)
    return f"Tables:\n{tables}\n\nWrite SQL: {question}", _QUERIES[kind].format(**names)


def _same_json(request: Request, text: str) -> float:
    wanted: dict[str, str] = json.loads(request.answer)
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    return sum(str(found.get(key)) == value for key, value in wanted.items()) / len(wanted)


def _same_sentence(request: Request, text: str) -> float:
    return float(text.strip().strip('"') == request.answer)


def _same_rows(request: Request, text: str) -> float:
    """Whether the model's query gives the rows of the right one, on tables with random contents."""
    rng = random.Random(request.source)
    lines = request.source.split("\n\n")[0].splitlines()[1:]
    budget = [_MAX_STEPS // 1000]

    def stop() -> bool:
        budget[0] -= 1
        return budget[0] < 0

    with closing(sqlite3.connect(":memory:")) as database:
        for line in lines:
            name, _, columns = line.rstrip(")").partition("(")
            width = len(columns.split(", "))
            database.execute(f'CREATE TABLE "{name}" ({columns})')
            rows = [[rng.randrange(100) for _ in range(width)] for _ in range(30)]
            database.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * width)})', rows)
        wanted = database.execute(request.answer).fetchall()
        database.set_progress_handler(stop, 1000)
        try:
            return float(database.execute(text.strip()).fetchall() == wanted)
        except (sqlite3.Error, sqlite3.Warning):
            return 0.0


class Draw(Protocol):
    """Where the requests of a use come from."""

    def __call__(self, split: Split, *, seed: int = 0) -> Iterator[Request]:
        """An endless stream of distinct requests, the same for the same seed."""


@dataclass(frozen=True)
class Use:
    """A kind of request, and how an answer is scored from 0 to 1."""

    name: str
    draw: Draw
    score: Callable[[Request, str], float]
    max_tokens: int

    def some(self, split: Split, count: int, *, seed: int = 0) -> list[Request]:
        """The first requests of the stream."""
        return list(islice(self.draw(split, seed=seed), count))


def _chats(name: str, make: Callable[[random.Random, Split], tuple[str, str]]) -> Draw:
    """Chats with one demonstration, of what ``make`` draws: a question and its answer."""

    def draw(split: Split, *, seed: int = 0) -> Iterator[Request]:
        rng = random.Random(f"{name}:{split}:{seed}")
        example, reply = make(random.Random(f"{name}:example"), "train")
        turns = ({"role": "user", "content": example}, {"role": "assistant", "content": reply})
        seen: set[str] = set()
        while True:
            question, answer = make(rng, split)
            if question not in seen:
                seen.add(question)
                yield Request((*turns, {"role": "user", "content": question}), answer, question)

    return draw


def use_of(task: Task) -> Use:
    """A task as a use: a small model was trained for it alone, and is asked without a demonstration."""

    def draw(split: Split, *, seed: int = 0) -> Iterator[Request]:
        for case in draw_cases(task, "train" if split == "train" else "test", seed=seed):
            yield Request((), case.answer, case.prompt, case.facts)

    def score(request: Request, text: str) -> float:
        return float(task.score([Case(request.source, request.answer, request.facts)], [text])[0])

    return Use(task.name, draw, score, _TASK_TOKENS)


USES = {
    use.name: use
    for use in (
        Use("json", _chats("json", _json_case), _same_json, 96),
        Use("quotes", _chats("quotes", _quote_case), _same_sentence, 48),
        Use("sql", _chats("sql", _sql_case), _same_rows, 48),
    )
}
