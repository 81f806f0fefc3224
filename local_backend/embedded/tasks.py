"""What the embedded model is taught, as training examples: topics, documents, edits, follow-up questions.

A task is a function from a generator of random numbers to an :class:`~local_backend.embedded.corpus.Example`;
``KINDS`` names them. Knows no tokenizers and no training.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from local_backend.embedded.corpus import (
    Example,
    Topic,
    Turn,
    load_topics,
    make_topic_example,
    request_table,
)
from local_backend.embedded.documents import (
    DocumentCase,
    Quotation,
    free_sentences,
    make_document_case,
    make_document_cases,
)
from local_backend.embedded.follow_ups import followed_up
from local_backend.embedded.invented import random_word

TOPIC_KINDS = ("plain", "beginning", "skeleton", "expansion", "several")


def make_example(
    kind: str,
    rng: random.Random,
    topics: Sequence[Topic] | None = None,
    *,
    about: Topic | None = None,
) -> Example:
    """One example of ``kind``, one of :data:`KINDS`.

    Args:
        kind: What is asked for.
        rng: Where every choice comes from.
        topics: What may be asked about; all by default.
        about: The topic of a kind among :data:`TOPIC_KINDS`; drawn unless given.

    Raises:
        ValueError: There is no such kind, or it is about no topic.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    topics = load_topics() if topics is None else topics
    if about is not None:
        if kind not in TOPIC_KINDS:
            raise ValueError(f"an example of kind {kind!r} is about no topic, got {about.name!r}")
        return make_topic_example(kind, about, topics, rng)
    return KINDS[kind](rng, topics)


def _about_a_topic(kind: str, rng: random.Random, topics: Sequence[Topic]) -> Example:
    return make_topic_example(kind, rng.choice(topics), topics, rng)


# Documents ----------------------------------------------------------------------------------------------


def render_documents(case: DocumentCase, layout: str) -> str:
    """The documents of ``case`` as one text, each in ``layout`` (see ``corpus/requests.toml``)."""
    return "\n\n".join(
        layout.format(number=number, name=document.name, text=document.text)
        for number, document in enumerate(case.documents, 1)
    )


def reply_to(quotations: Sequence[Quotation], *, numbered: bool) -> str:
    """What the model is taught to answer: the sentences, cited where the documents are ``numbered``."""
    table = request_table()["documents"]
    return " ".join(
        table["reply_further" if place else "reply"].format(sentence=quotation.sentence)
        + (f" [{quotation.document + 1}]" if numbered else "")
        for place, quotation in enumerate(quotations)
    )


def _from_documents(
    num_documents: tuple[int, int], num_sentences: tuple[int, int], rng: random.Random, _: Sequence[Topic]
) -> Example:
    case = make_document_case(
        rng,
        num_documents=rng.randint(*num_documents),
        num_sentences=rng.randint(*num_sentences),
        num_quotations=2 if rng.random() < 0.15 else 1,
    )
    table = request_table()["documents"]
    layout = rng.choice(table["layouts"])
    documents = render_documents(case, layout)
    reply = reply_to(case.quotations, numbered=layout.startswith("[{number}]"))
    draw = rng.random()
    if draw < 0.8:
        template = table["requests"][0] if rng.random() < 0.25 else rng.choice(table["requests"])
        turns = [Turn("system", rng.choice(table["system_messages"]))] if rng.random() < 0.15 else []
        request = template.strip("\n").format(documents=documents, question=case.question)
    elif draw < 0.93:
        turns = [Turn("system", rng.choice(table["system_with_documents"]).format(documents=documents))]
        request = case.question
    else:
        turns = [Turn("user", documents), Turn("assistant", "Thank you.")]
        request = case.question
    return Example(tuple(turns), ((request, "", reply),))


def _questions(
    num_documents: tuple[int, int],
    num_sentences: tuple[int, int],
    rng: random.Random,
    _: Sequence[Topic],
    *,
    is_cut: bool = False,
) -> Example:
    """Several questions about documents that are read once: what differs stands behind them.

    Where ``is_cut`` the answers break off after a few words: enough to learn which sentence to take.
    """
    cases = make_document_cases(
        rng,
        num_documents=rng.randint(*num_documents),
        num_sentences=rng.randint(*num_sentences),
        num_questions=rng.randint(6, 10) if is_cut else rng.randint(4, 7),
    )
    table = request_table()["documents"]
    layout = rng.choice(table["layouts"])
    documents = render_documents(cases[0], layout)
    replies = [reply_to(case.quotations, numbered=layout.startswith("[{number}]")) for case in cases]
    questions = [case.question for case in cases]
    turns: list[Turn] = []
    if rng.random() < 0.15:
        turns = [Turn("system", rng.choice(table["system_with_documents"]).format(documents=documents))]
        requests = questions
    else:
        if rng.random() < 0.15:
            turns = [Turn("system", rng.choice(table["system_messages"]))]
        asked_last = [
            template
            for template in table["requests"]
            if template.index("{documents}") < template.index("{question}")
        ]
        template = (asked_last[0] if rng.random() < 0.25 else rng.choice(asked_last)).strip("\n")
        requests = [template.format(documents=documents, question=question) for question in questions]
    if is_cut:
        num_words = len(table["reply"].split()) - 1 + 3
        replies = [" ".join(reply.split(" ")[:num_words]) for reply in replies]
    branches = zip(requests, replies, strict=True)
    return Example(tuple(turns), tuple((request, "", reply) for request, reply in branches), ends=not is_cut)


def _repeat(rng: random.Random, _: Sequence[Topic]) -> Example:
    sentences = free_sentences(rng.randint(1, 3), rng)[1]
    text = " ".join(sentences)
    request = rng.choice(request_table()["repeat"]["requests"]).format(text=text)
    return Example((), ((request, "", text),), copies=True)


# Edits of an earlier answer -----------------------------------------------------------------------------

EDITS = ("shorter", "add", "replace")
NUM_KEPT = 2  # points of an answer made shorter

POINT_STYLES = (  # that of plain answers first
    "{number}. **{heading}**: {text}",
    "{text}",
)


def write_points(points: Sequence[tuple[str, str]], style: str) -> str:
    """An answer of points, headings with texts, in a style of :data:`POINT_STYLES`."""
    return "\n\n".join(
        style.format(number=number, heading=heading, text=text)
        for number, (heading, text) in enumerate(points, 1)
    )


def _points_to_edit(
    rng: random.Random, topics: Sequence[Topic]
) -> tuple[str, list[tuple[str, str]], tuple[str, str]]:
    """A question, the points of its answer, and one more point that could be added."""
    count = rng.randint(3, 4)
    if rng.random() < 0.4:
        topic = rng.choice(topics)
        chosen = rng.sample(topic.points, count + 1)
        points = [(point.heading, point.text) for point in chosen]
        return rng.choice(topic.taught_questions), points[:-1], points[-1]
    points = []
    for _ in range(count):
        title, sentences = free_sentences(2, rng)
        points.append((title, " ".join(sentences)))
    new = " ".join(random_word(rng) for _ in range(rng.randint(1, 3))).capitalize()
    question = f"What should I know about {free_sentences(1, rng)[0].lower()}?"
    return question, points, (new, request_table()["edit"]["new_point"])


def _edit(replaced_share: float, rng: random.Random, topics: Sequence[Topic]) -> Example:
    """Several requests to change one answer: only who reads the request knows what to write."""
    table = request_table()["edit"]
    question, points, new = _points_to_edit(rng, topics)
    numbered, bare = POINT_STYLES
    style = bare if rng.random() < 0.1 else numbered
    text = write_points(points, style)
    changes = ["shorter", "add"] if style == numbered else []  # only numbered points are added to
    changes += ["replace"] * (not changes or rng.random() < replaced_share)
    rng.shuffle(changes)
    edits = [
        make_edit(change, text, points, new, style=style, rng=rng) for change in changes[: rng.randint(1, 3)]
    ]
    if rng.random() < 0.3:
        request, reply = edits[0]
        framed = rng.choice(table["frames"]).format(text=text, request=request)
        return Example((), ((framed, "", reply),), copies=True)
    branches = tuple((request, "", reply) for request, reply in edits)
    return Example((Turn("user", question), Turn("assistant", text)), branches, copies=True)


def make_edit(
    change: str,
    text: str,
    points: Sequence[tuple[str, str]],
    new: tuple[str, str],
    *,
    style: str,
    rng: random.Random,
) -> tuple[str, str]:
    """A request for a change of an answer, and the answer changed.

    Args:
        change: One of :data:`EDITS`.
        text: The answer.
        points: Its points.
        new: A heading, which may come in small letters, and a text that could be added.
        style: Of the answer, one of :data:`POINT_STYLES`.
        rng: Draws the wording, and the words of a replacement.
    """
    request = rng.choice(request_table()["edit"][change])
    if change == "shorter":
        return request, write_points(points[:NUM_KEPT], style)
    if change == "add":
        heading, text_of_new = new
        if rng.random() < 0.3:  # it is taken as it is asked for
            heading = heading[0].lower() + heading[1:]
        return request.format(heading=heading), write_points([*points, (heading, text_of_new)], style)
    # Words that stand there once, behind a space.
    words = Counter(re.findall(r"\w+", text.lower()))
    old = rng.choice([word for word in re.findall(r"(?<= )\w{4,}", text) if words[word.lower()] == 1])
    if rng.random() < 0.2:  # two words
        pairs = re.findall(r"(?=(?<= )(\w{3,} \w{3,}))", text)
        old = rng.choice([pair for pair in pairs if words[pair.split()[0].lower()] == 1] or [old])
    by = " ".join(random_word(rng) for _ in range(rng.choice((1, 1, 1, 2))))
    return request.format(old=old, new=by), re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", lambda _: by, text)


# A follow-up question made to stand alone ---------------------------------------------------------------


_MOST_FOLLOW_UPS = 5  # about one conversation


def _follow_ups(
    rng: random.Random, topics: Sequence[Topic], count: int
) -> tuple[list[tuple[str, str]], Sequence[tuple[str, str]]]:
    """Earlier questions with answers, and follow-ups, each with the same question as it stands alone."""
    draw = rng.random()
    if draw < 0.25:
        topic = rng.choice(topics)
        title = topic.title[0].lower() + topic.title[1:]
        follow_ups = []
        for point in rng.sample(topic.points, count):
            asked = rng.choice(("What about {0}?", "Tell me more about {0}.", "Why does {0} matter?"))
            follow_up = asked.format(point.heading[0].lower() + point.heading[1:])
            follow_ups.append((follow_up, f"{follow_up[:-1]} in {title}{follow_up[-1]}"))
        return [(rng.choice(topic.taught_questions), rng.choice(topic.points).text)], follow_ups
    subject = followed_up(rng, count)
    answer = rng.choice((subject.answer, f"The documents say: {subject.answer}"))
    history = [(subject.question, answer)]
    if draw < 0.4:
        other = followed_up(rng)
        history.insert(0, (other.question, other.answer))
    return history, subject.follow_ups


def _condense(count: int, rng: random.Random, topics: Sequence[Topic]) -> Example:
    """Up to ``count`` follow-ups to one conversation, none of which sees the others."""
    table = request_table()["condense"]
    history, follow_ups = _follow_ups(rng, topics, count)
    if rng.random() < 0.3:
        turns = [Turn("system", rng.choice(table["system_messages"]))]
        for question, answer in history:
            turns += [Turn("user", question), Turn("assistant", answer)]
        branches = tuple((follow_up, "", standalone) for follow_up, standalone in follow_ups)
        return Example(tuple(turns), branches, copies=True)
    user, assistant = rng.choice(table["speakers"])
    lines = "\n".join(f"{user}: {question}\n{assistant}: {answer}" for question, answer in history)
    template = rng.choice(table["requests"]).strip("\n")
    branches = tuple(
        (template.format(history=lines, question=follow_up), "", standalone)
        for follow_up, standalone in follow_ups
    )
    return Example((), branches, copies=True)


Task = Callable[[random.Random, Sequence[Topic]], Example]
KINDS: Mapping[str, Task] = {
    **{kind: partial(_about_a_topic, kind) for kind in TOPIC_KINDS},
    "repeat": _repeat,
    "short documents": partial(_from_documents, (1, 1), (2, 4)),
    "documents": partial(_from_documents, (2, 3), (2, 4)),
    "long documents": partial(_from_documents, (3, 6), (3, 6)),
    "choices": partial(_questions, (1, 3), (2, 5), is_cut=True),
    "questions": partial(_questions, (1, 3), (2, 4)),
    "many questions": partial(_questions, (2, 5), (3, 6)),
    "edit": partial(_edit, 0.3),
    "points": partial(_edit, 0.0),
    "condense": partial(_condense, 1),
    "follow-ups": partial(_condense, _MOST_FOLLOW_UPS),
}
