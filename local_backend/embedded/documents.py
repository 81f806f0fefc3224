"""Made-up documents, and questions whose answer is a sentence of theirs.

Nothing in them is true: names, numbers and codes are invented anew for every case, so that a model can
answer only by copying. Three sources of sentences: families of facts (``corpus/facts.md``), sentences of the
corpus in which words were exchanged, and sentences of random words. Knows no tokenizers and no training.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from local_backend.embedded.corpus import load_topics
from local_backend.embedded.facts import FIELD, Family, Values, families
from local_backend.embedded.invented import invented_word, random_word, value_of, words

# How a question may name what a sentence says, where no question was written for it.
_ABOUT = (
    "What do the documents say about {phrase}?",
    "What is said about {phrase}?",
    "What does the text say about {phrase}?",
    "What about {phrase}?",
    "Tell me about {phrase}.",
    "{phrase}?",
    "How about {phrase}?",
    "Is there anything on {phrase}?",
    "Where is {phrase} mentioned?",
    "What do I need to know about {phrase}?",
    "Which sentence mentions {phrase}?",
    "What happens with {phrase}?",
    "Why {phrase}?",
    "How {phrase}?",
    "When {phrase}?",
    "Who {phrase}?",
    "What {phrase}?",
)


@dataclass(frozen=True)
class Document:
    """One document: what it is called, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Quotation:
    """A sentence that answers a question.

    Attributes:
        sentence: As it stands in the document.
        document: The document's place among the case's documents, from 0.
        fact: The part of the sentence that was asked for.
    """

    sentence: str
    document: int
    fact: str


@dataclass(frozen=True)
class DocumentCase:
    """Documents, a question about them, and the one or two sentences that answer it."""

    documents: tuple[Document, ...]
    question: str
    quotations: tuple[Quotation, ...]


@dataclass(frozen=True)
class Asked:
    """A sentence, and questions it answers, each with the fact it asks for."""

    sentence: str
    questions: tuple[tuple[str, str], ...]


def _facts_about(family: Family, count: int, rng: random.Random) -> tuple[str, list[Asked]]:
    subject = value_of(family.subject, rng)
    asked = []
    for fact in rng.sample(family.facts, min(count, len(family.facts))):
        values = Values(subject, rng)
        sentence = values.fill(fact.sentence)
        sentence = sentence[0].upper() + sentence[1:]
        pairs = [(values.fill(question), field) for question, field in fact.questions]
        # A field that is no field is a word of the sentence, as "winter".
        known = set(FIELD.findall(fact.sentence))
        asked.append(
            Asked(
                sentence,
                tuple((question, values[field] if field in known else field) for question, field in pairs),
            )
        )
    return subject, asked


@cache
def _corpus_sentences() -> tuple[str, ...]:
    return tuple(
        sentence
        for topic in load_topics()
        for point in topic.points
        for sentence in re.split(r"(?<=\.) (?=[A-Z])", point.text)
    )


def _exchanged(sentence: str, share: float, rng: random.Random) -> str:
    parts = sentence.rstrip(".").split(" ")
    exchanged = [
        random_word(rng) + ("," if part.endswith(",") else "")
        if len(part) > 3 and rng.random() < share
        else part
        for part in parts
    ]
    text = " ".join(exchanged)
    return text[0].upper() + text[1:] + "."


def _random_sentence(rng: random.Random) -> str:
    text = " ".join(random_word(rng) for _ in range(rng.randint(5, 16)))
    return text[0].upper() + text[1:] + rng.choice("...........!?")


def _ask_about(sentence: str, rng: random.Random) -> Asked:
    """A question made of some of the sentence's own words."""
    parts = sentence.rstrip(".!").replace(",", "").split(" ")
    num_words = min(len(parts), rng.choice((1, 2, 2, 3, 3, 4, 5)))
    telling = [index for index, part in enumerate(parts) if len(part) > 4] or list(range(len(parts)))
    if rng.random() < 0.6:
        start = min(rng.choice(telling), len(parts) - num_words)
        phrase = " ".join(parts[start : start + num_words])
    else:
        chosen = sorted(rng.sample(telling, min(len(telling), num_words)))
        phrase = rng.choice((" ", " ", " and ")).join(parts[index] for index in chosen)
    if parts[0] in phrase.split(" ") and rng.random() < 0.7:
        phrase = phrase[0].lower() + phrase[1:]
    question = rng.choice(_ABOUT).format(phrase=phrase)
    return Asked(sentence, ((question[0].upper() + question[1:], phrase),))


def _free_asked(count: int, rng: random.Random) -> tuple[str, list[Asked]]:
    draw = rng.random()
    if draw < 0.6:
        share = rng.choice((0.0, 0.15, 0.3, 0.5))
        chosen = [_exchanged(sentence, share, rng) for sentence in rng.sample(_corpus_sentences(), count)]
    elif draw < 0.9:
        chosen = [_random_sentence(rng) for _ in range(count)]
    else:  # labels with values, as in a data sheet
        chosen = [
            f"{rng.choice((invented_word(rng), rng.choice(words()['any']))).capitalize()} "
            f"{rng.choice(words()['noun'])}: " + " ".join(random_word(rng) for _ in range(rng.randint(4, 9)))
            for _ in range(count)
        ]
    title = " ".join(random_word(rng) for _ in range(rng.choice((1, 2, 3))))
    return title.capitalize(), [_ask_about(sentence, rng) for sentence in chosen]


def _lay_out(title: str, sentences: Sequence[str], rng: random.Random) -> str:
    draw = rng.random()
    if any(sentence[-1] not in ".!?" for sentence in sentences):
        draw = 0.62 + 0.21 * draw  # each on its own line, where no full stop ends it
    if draw < 0.62:
        return " ".join(sentences)
    if draw < 0.72:
        return "\n".join(f"- {sentence}" for sentence in sentences)
    if draw < 0.78:
        return "\n".join(sentences)
    if draw < 0.83:
        return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))
    cut = rng.randint(1, len(sentences))
    halves = [" ".join(half) for half in (sentences[:cut], sentences[cut:]) if half]
    if draw < 0.93:
        return "\n\n".join(halves)
    return f"# {title}\n\n" + "\n\n".join(halves)


def _file_name(title: str, rng: random.Random) -> str:
    if rng.random() < 0.6:
        return title
    stem = re.sub(r"\W+", rng.choice("-_"), title.lower()).strip("-_") or "notes"
    return f"{stem}.{rng.choice(('md', 'txt', 'pdf', 'html', 'rst'))}"


def make_document_case(
    rng: random.Random,
    *,
    num_documents: int,
    num_sentences: int,
    num_quotations: int = 1,
    facts_share: float = 0.5,
) -> DocumentCase:
    """Documents of about ``num_sentences`` sentences each and a question about them.

    Args:
        rng: Where every choice comes from.
        num_documents: How many documents.
        num_sentences: Sentences of each, at most.
        num_quotations: How many facts the question asks for, one or two.
        facts_share: Share of documents made of facts; the others are free sentences.
    """
    documents, known = _make_documents(rng, num_documents, num_sentences, facts_share)
    return _ask(documents, known, num_quotations, rng)


def make_document_cases(
    rng: random.Random, *, num_documents: int, num_sentences: int, num_questions: int
) -> list[DocumentCase]:
    """Several questions about the same documents; every sixth or so asks for two facts."""
    documents, known = _make_documents(rng, num_documents, num_sentences, 0.6)
    return [_ask(documents, known, 2 if rng.random() < 0.15 else 1, rng) for _ in range(num_questions)]


def _make_documents(
    rng: random.Random, num_documents: int, num_sentences: int, facts_share: float
) -> tuple[tuple[Document, ...], list[list[Asked]]]:
    """Documents, and for each what its sentences may be asked."""
    documents: list[Document] = []
    known: list[list[Asked]] = []
    family = rng.choice(families())
    for _ in range(num_documents):
        count = rng.randint(max(1, num_sentences - 2), num_sentences)
        if rng.random() < facts_share:
            # Often of the same family, so that the subject of the question must be minded.
            family = family if rng.random() < 0.4 else rng.choice(families())
            title, asked = _facts_about(family, count, rng)
            if len(asked) < count and rng.random() < 0.5:
                asked += _free_asked(count - len(asked), rng)[1]
                rng.shuffle(asked)
        else:
            title, asked = _free_asked(count, rng)
        documents.append(
            Document(_file_name(title, rng), _lay_out(title, [one.sentence for one in asked], rng))
        )
        known.append(asked)
    return tuple(documents), known


def _clear(known: Sequence[Sequence[Asked]]) -> list[list[Asked]]:
    """Of what each document may be asked, that to which one sentence of all documents is the answer."""
    sentences = [one for asked in known for one in asked]
    times_asked = Counter(question for one in sentences for question, _ in one.questions)

    def is_clear(one: Asked, question: str, fact: str) -> bool:
        # A question made of the sentence's own words names no fact but them.
        is_named = fact.lower() in question.lower()
        return times_asked[question] == 1 and not (
            is_named and any(fact in other.sentence for other in sentences if other is not one)
        )

    clear = [
        [Asked(one.sentence, tuple(pair for pair in one.questions if is_clear(one, *pair))) for one in asked]
        for asked in known
    ]
    return [[one for one in asked if one.questions] for asked in clear]


def _ask(
    documents: tuple[Document, ...],
    known: Sequence[Sequence[Asked]],
    num_quotations: int,
    rng: random.Random,
) -> DocumentCase:
    clear = _clear(known)
    # Where every question has two answers, one of them must do.
    askable = clear if any(clear) else known
    place = rng.choice([place for place, asked in enumerate(askable) if asked])
    chosen = rng.sample(askable[place], min(num_quotations, len(askable[place])))
    questions, quotations = [], []
    for one in chosen:
        question, fact = rng.choice(one.questions)
        questions.append(question)
        quotations.append(Quotation(one.sentence, place, fact))
    question = questions[0]
    if len(questions) == 2:
        second = questions[1][0].lower() + questions[1][1:]
        question = rng.choice(
            (
                f"{questions[0].rstrip('?.')}, and {second}",
                f"{questions[0]} And {second}",
                " ".join(questions),
            )
        )
    return DocumentCase(documents, question, tuple(quotations))


def free_sentences(count: int, rng: random.Random) -> tuple[str, list[str]]:
    """A title and ``count`` sentences that need not mean anything."""
    title, asked = _free_asked(count, rng)
    return title, [one.sentence for one in asked]
