"""The corpus of the embedded model, as values: topics, and what the model is asked about them.

Knows the folder of readable text beside it and the shape of a training example. Does not know
tokenizers, tensors or training.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

# Of the beginnings, those asked for in questions that are put together from a topic's other words. Nowhere
# else: with so many ways to ask, whole answers learn too late which heading comes next.
_DRAWN_SHARE = 0.25
# Of the questions otherwise, those made of the topic's title, among words of a situation and without.
_SITUATED_SHARE, _BY_TITLE_SHARE = 0.2, 0.2
CORPUS = Path(__file__).parent / "corpus"

_TOPIC = re.compile(
    r"# (?P<title>[^\n]+)\n\n"
    r"## Questions\n\n(?P<questions>(?:- [^\n]+\n)+)\n"
    r"## Points\n\n(?P<points>(?:\d+\. [^\n]+\n[^\n]+\n)+)"
)


@dataclass(frozen=True)
class TopicPoint:
    """One point of a topic: its heading and the two sentences that expand it."""

    heading: str
    text: str


@dataclass(frozen=True)
class Topic:
    """One subject the model knows: the questions that ask for it and the points that answer them.

    Attributes:
        name: Of its file.
        title: For people.
        questions: Phrasings written out, the last of them held out.
        points: What answers them.
        things: Other names of what it is about, see ``corpus/phrasings.toml``.
        doings: What people want who ask, as it stands behind "how to".
    """

    name: str
    title: str
    questions: tuple[str, ...]
    points: tuple[TopicPoint, ...]
    things: tuple[str, ...] = ()
    doings: tuple[str, ...] = ()

    @property
    def taught_questions(self) -> tuple[str, ...]:
        """The phrasings used in training: all but the last."""
        return self.questions[:-1]

    @property
    def held_out_question(self) -> str:
        """The phrasing never used in training, to evaluate with."""
        return self.questions[-1]

    def questions_by_title(self, table: str) -> tuple[str, ...]:
        """Phrasings made of the title; ``table`` is "about", or "about_held_out" for evaluation."""
        return tuple(
            _capital(wording.format(title=self._title_inside)) for wording in _question_table()[table]
        )

    def situated_question(self, rng: random.Random) -> str:
        """The title among words of a situation in which somebody asks."""
        table = _question_table()
        words = {slot: rng.choice(table[slot]) for slot in ("person", "work", "ask")}
        return _capital(rng.choice(table["situated"]).format(title=self._title_inside, **words))

    @property
    def _title_inside(self) -> str:
        """As it stands inside a sentence."""
        return self.title if self.title[1].isupper() else self.title[0].lower() + self.title[1:]

    def drawn_question(self, rng: random.Random) -> str:
        """A question put together from the topic's other words.

        Raises:
            ValueError: The topic has none.
        """
        if len(self.things) < 2 or len(self.doings) < 2:
            raise ValueError(f"topic {self.name!r} needs two things and two doings in phrasings.toml")
        thing, other_thing = rng.sample(self.things, 2)
        doing, other_doing = rng.sample(self.doings, 2)
        frame = rng.choice(_phrasings()["frames"])
        return _capital(
            frame.format(thing=thing, other_thing=other_thing, doing=doing, other_doing=other_doing)
        )

    @property
    def held_out_questions(self) -> tuple[str, ...]:
        """Every phrasing never used in training."""
        return (self.held_out_question, *self.questions_by_title("about_held_out"))

    @property
    def skeleton(self) -> str:
        """The headings as a numbered list."""
        return "\n".join(f"{number}. {point.heading}" for number, point in enumerate(self.points, 1))

    @property
    def answer(self) -> str:
        """The plain answer: every heading with its text."""
        return "\n\n".join(
            f"{number}. **{point.heading}**: {point.text}" for number, point in enumerate(self.points, 1)
        )


@dataclass(frozen=True)
class Requests:
    """The wordings of one kind of request; see ``corpus/requests.toml``."""

    requests: tuple[str, ...]
    opening: str
    reply_start: str


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Example:
    """What one training row is made of: turns that several continuations share.

    Attributes:
        turns: Messages before the one that differs; complete.
        branches: Per continuation the last user message, the given start of the reply, and the rest of the
            reply, which alone is learned.
        ends: Whether the reply is complete.
        copies: Whether replies are copied up to a place where they go on otherwise: that place weighs more.
    """

    turns: tuple[Turn, ...]
    branches: tuple[tuple[str, str, str], ...]
    ends: bool = True
    copies: bool = False


def parse_topic(name: str, text: str) -> Topic:
    """Read one topic file.

    Raises:
        ValueError: The text does not have the form of a topic file.
    """
    match = _TOPIC.fullmatch(text)
    if match is None:
        raise ValueError(
            f"topic {name!r} is not of the form '# title', '## Questions' with '- ' lines, '## Points' with "
            "a numbered heading and one line of text each"
        )
    lines = match["points"].splitlines()
    points = tuple(
        TopicPoint(heading.split(". ", 1)[1], text)
        for heading, text in zip(lines[::2], lines[1::2], strict=True)
    )
    questions = tuple(line[2:] for line in match["questions"].splitlines())
    return Topic(name=name, title=match["title"], questions=questions, points=points)


@cache
def load_topics(folder: Path = CORPUS / "topics") -> tuple[Topic, ...]:
    """Every topic of the corpus, in the order of file names."""
    topics = (parse_topic(path.stem, path.read_text("utf-8")) for path in sorted(folder.glob("*.md")))
    return tuple(
        replace(topic, things=tuple(words["things"]), doings=tuple(words["doings"]))
        for topic in topics
        for words in [_phrasings().get(topic.name, {"things": (), "doings": ()})]
    )


@cache
def load_requests() -> dict[str, Requests]:
    """The request wordings by kind: ``"skeleton"``, ``"expansion"`` and ``"several"``."""
    table = request_table()
    return {
        kind: Requests(
            requests=tuple(text.strip("\n") for text in table[kind]["requests"]),
            opening="\n\n" + table[kind]["opening"].strip("\n"),
            reply_start=table[kind]["reply_start"],
        )
        for kind in ("skeleton", "expansion", "several")
    }


@cache
def request_table() -> dict[str, dict[str, Any]]:
    """``corpus/requests.toml`` as it stands."""
    return tomllib.loads((CORPUS / "requests.toml").read_text("utf-8"))


@cache
def _phrasings() -> dict[str, Any]:
    return tomllib.loads((CORPUS / "phrasings.toml").read_text("utf-8"))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _question_table() -> dict[str, list[str]]:
    return request_table()["question"]


def vary_question(question: str, rng: random.Random) -> str:
    """``question`` as other people would type it: other case, no question mark, words around it."""
    if rng.random() < 0.1:
        question = question.lower()
    if rng.random() < 0.1:
        question = question.rstrip("?.")
    if rng.random() < 0.12:
        words = question.split(" ")
        if len(words) > 5:
            del words[rng.randrange(len(words))]
        question = " ".join(words)
    if rng.random() < 0.2:
        question = rng.choice(_question_table()["wrappers"]).format(question=question)
    return question


def _earlier_turns(topics: Sequence[Topic], rng: random.Random) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    if rng.random() < 0.15:
        turns.append(Turn("system", rng.choice(_question_table()["system_messages"])))
    if rng.random() < 0.08:
        other = rng.choice(topics)
        turns.append(Turn("user", rng.choice(other.taught_questions)))
        turns.append(Turn("assistant", rng.choice(other.points).text))
    return tuple(turns)


def _taught_question(kind: str, topic: Topic, rng: random.Random) -> str:
    if kind == "beginning" and topic.doings and rng.random() < _DRAWN_SHARE:
        return topic.drawn_question(rng)
    draw = rng.random()
    if draw < _SITUATED_SHARE:
        return topic.situated_question(rng)
    by_title = draw < _SITUATED_SHARE + _BY_TITLE_SHARE
    return rng.choice(topic.questions_by_title("about") if by_title else topic.taught_questions)


def _first_sentence(answer: str) -> str:
    number, heading_and_sentence, _ = answer.split(".", 2)
    return f"{number}.{heading_and_sentence}."


def make_topic_example(kind: str, topic: Topic, topics: Sequence[Topic], rng: random.Random) -> Example:
    """One example about ``topic``.

    Args:
        kind: "plain", "beginning" (of plain), "skeleton", "expansion" (of each point alone) or "several"
            (points in one reply).
        topic: What it is about.
        topics: All of them; others stand in earlier turns.
        rng: Where every choice comes from.
    """
    question = vary_question(_taught_question(kind, topic, rng), rng)
    turns = _earlier_turns(topics, rng)
    if kind == "plain":
        return Example(turns, ((question, "", topic.answer),))
    if kind == "beginning":  # of a plain answer: short, so that a step holds many questions
        return Example(turns, ((question, "", _first_sentence(topic.answer)),), ends=False)
    wordings = load_requests()[kind]
    template = wordings.requests[0] if rng.random() < 0.7 else rng.choice(wordings.requests[1:])
    begun = rng.random() < 0.6
    if kind == "skeleton":
        request = template.format(question=question) + ("" if begun else wordings.opening)
        start = wordings.reply_start if begun else ""
        return Example(turns, ((request, start, topic.skeleton.removeprefix(start)),))
    branches = []
    for group in _groups(topic, 1 if kind == "expansion" else rng.randint(2, 4)):
        number, point = group[0]
        fields = {"number": number, "point": point.heading}
        points = "\n".join(f"{number}. {point.heading}" for number, point in group)
        request = template.format(question=question, skeleton=topic.skeleton, points=points, **fields)
        start = wordings.reply_start.format(**fields)
        reply = "\n".join(f"{number}. {point.heading}: {point.text}" for number, point in group)
        rest = reply.removeprefix(start)
        if begun:
            branches.append((request, start, rest))
        elif kind == "expansion":
            branches.append((request + wordings.opening, "", rest.lstrip()))
        else:
            branches.append((request + wordings.opening.format(**fields), "", reply))
    return Example(turns, tuple(branches))


def _groups(topic: Topic, size: int) -> Iterator[list[tuple[int, TopicPoint]]]:
    numbered = list(enumerate(topic.points, 1))
    for start in range(0, len(numbered), size):
        yield numbered[start : start + size]


def all_texts(topics: Sequence[Topic]) -> Iterator[str]:
    """Every text the tokenizer should know well."""
    for topic in topics:
        yield from topic.questions
        yield from topic.questions_by_title("about")
        yield topic.skeleton
        yield topic.answer
    for _ in range(20):
        yield from _strings(request_table())


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _strings(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _strings(item))
