"""What the embedded model is measured on: phrasings, documents and requests it was never trained on.

Points alone are asked for in the words of training: they are to be known by heart. So are changes, of
answers that training did not put together so.

Knows prompts and answers as text, and how to teacher-force the model on answers it should give. Does not know
how a skeleton is parsed.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from local_backend.embedded.corpus import CORPUS, Topic, load_requests, request_table
from local_backend.embedded.documents import Document, DocumentCase, Quotation, make_document_case
from local_backend.embedded.tasks import (
    EDITS,
    POINT_STYLES,
    make_edit,
    make_example,
    render_documents,
    reply_to,
    write_points,
)

NUM_FOLLOW_UPS = 40  # that the model is judged by
_SEED = "held out"  # no example of training is drawn from it
_DOCUMENT = re.compile(r"# (?P<name>[^\n]+)\n(?P<text>.+?)\n(?P<questions>(?:- [^\n]+\n?)+)", re.DOTALL)


@dataclass(frozen=True)
class DocumentPrompt:
    """A question about documents, as it is sent, and what a good answer holds."""

    messages: tuple[tuple[str, str], ...]
    case: DocumentCase
    reply: str

    @property
    def text(self) -> str:
        """All the documents."""
        return "\n\n".join(document.text for document in self.case.documents)


def held_out_phrasings(topics: Sequence[Topic], count: int) -> list[tuple[Topic, str]]:
    """Topics with a question for each that was never used in training: the topics' own ones first."""
    table = [[(topic, topic.held_out_questions[place]) for topic in topics] for place in range(4)]
    phrasings = [pair for column in table for pair in column]
    if count > len(phrasings):
        raise ValueError(f"there are {len(phrasings)} held-out phrasings, asked for {count}")
    return phrasings[:count]


def written_cases() -> list[DocumentCase]:
    """Questions about the documents of ``corpus/unseen.md``, each with two other documents beside it."""
    blocks = (CORPUS / "unseen.md").read_text("utf-8").split("\n\n# ")[1:]
    parsed = []
    for block in blocks:
        match = _DOCUMENT.fullmatch(f"# {block.strip()}\n")
        if match is None:
            raise ValueError(f"unseen.md holds a document of another form: {block[:80]!r}")
        pairs = [line[2:].split(" => ") for line in match["questions"].strip().splitlines()]
        parsed.append((Document(match["name"], match["text"].strip()), pairs))
    rng = random.Random(_SEED)
    cases = []
    for document, pairs in parsed:
        for question, fact in pairs:
            others = rng.sample([other for other, _ in parsed if other is not document], 2)
            documents = others[: rng.randint(0, 2)]
            place = rng.randint(0, len(documents))
            documents.insert(place, document)
            sentences = re.split(r"(?<=[.!?]) (?=[A-Z0-9])", document.text)
            sentence = next(sentence for sentence in sentences if fact in sentence)
            cases.append(DocumentCase(tuple(documents), question, (Quotation(sentence, place, fact),)))
    return cases


def unseen_documents(count: int) -> list[DocumentPrompt]:
    """Half of ``count`` questions on documents written by hand, half on made-up ones; wordings in turn."""
    written = written_cases()
    random.Random(_SEED).shuffle(written)
    cases = written[: count // 2]
    rng = random.Random(f"{_SEED} documents")
    while len(cases) < count:
        cases.append(
            make_document_case(
                rng, num_documents=rng.randint(1, 3), num_sentences=rng.randint(2, 5), facts_share=1.0
            )
        )
    table = request_table()["documents"]
    prompts = []
    for number, case in enumerate(cases):
        # The wording that is sent by default for a half of them, the others in turn.
        template = table["requests"][0 if number % 2 else number // 2 % len(table["requests"])]
        layout = table["layouts"][0 if number % 4 == 1 else number % len(table["layouts"])]
        documents = render_documents(case, layout)
        request = template.strip("\n").format(documents=documents, question=case.question)
        reply = reply_to(case.quotations, numbered=layout.startswith("[{number}]"))
        prompts.append(DocumentPrompt((("user", request),), case, reply))
    return prompts


@dataclass(frozen=True)
class ReplyPrompt:
    """A request whose good reply is known word for word.

    Attributes:
        kind: What is asked for.
        messages: What is sent.
        reply: What should come back, without ``start`` and spaces around it.
        start: What the reply is begun with.
    """

    kind: str
    messages: tuple[tuple[str, str], ...]
    reply: str
    start: str = ""


def point_prompts(topics: Sequence[Topic]) -> list[ReplyPrompt]:
    """Every point of every topic's outline, each asked for by itself, as ``sot_chains`` asks."""
    wordings = load_requests()["expansion"]
    prompts = []
    for topic in topics:
        for number, point in enumerate(topic.points, 1):
            fields = {"number": number, "point": point.heading}
            request = wordings.requests[0].format(
                question=topic.taught_questions[0], skeleton=topic.skeleton, **fields
            )
            start = wordings.reply_start.format(**fields)
            prompts.append(ReplyPrompt("point", (("user", request),), point.text, start))
    return prompts


def edit_prompts(topics: Sequence[Topic]) -> list[ReplyPrompt]:
    """Of each topic an answer of three or four points, with one request for each kind of change."""
    prompts = []
    for topic in topics:
        rng = random.Random(f"{_SEED} edits {topic.name}")
        *points, new = [(point.heading, point.text) for point in topic.points[: rng.randint(4, 5)]]
        text = write_points(points, POINT_STYLES[0])
        for change in EDITS:
            request, reply = make_edit(change, text, points, new, style=POINT_STYLES[0], rng=rng)
            question = topic.taught_questions[0]
            messages = (("user", question), ("assistant", text), ("user", request))
            prompts.append(ReplyPrompt(change, messages, reply))
    return prompts


def follow_up_prompts(count: int, topics: Sequence[Topic]) -> list[ReplyPrompt]:
    """Follow-up questions to be written so that they stand alone."""
    prompts = []
    for number in range(count):
        example = make_example("condense", random.Random(f"{_SEED} condense {number}"), topics)
        request, _, reply = example.branches[0]
        turns = [(turn.role, turn.content) for turn in example.turns]
        prompts.append(ReplyPrompt("condense", (*turns, ("user", request)), reply))
    return prompts


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]], start: str = ""
) -> list[int]:
    """Token ids of a prompt: the messages, and the start of the reply."""
    turns = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(f"{text}{start}", add_special_tokens=False))


def repeats_ngram(text: str, size: int = 6) -> bool:
    """Whether ``text`` holds the same ``size`` words in a row twice."""
    words = re.findall(r"\w+", text.lower())
    grams = [tuple(words[place : place + size]) for place in range(len(words) - size + 1)]
    return len(set(grams)) < len(grams)


def longest_quotation(tokenizer: PreTrainedTokenizerBase, answer: str, source: str) -> int:
    """Tokens of the longest stretch of ``answer`` that stands in ``source``, in tokens of the answer."""
    encoded = tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
    spans = encoded["offset_mapping"]
    longest = first = 0
    for last in range(len(spans)):
        while first <= last and answer[spans[first][0] : spans[last][1]].strip() not in source:
            first += 1
        longest = max(longest, last - first + 1)
    return longest


def quotes_the_fact(tokenizer: PreTrainedTokenizerBase, answer: str, prompt: DocumentPrompt) -> bool:
    """Whether an answer quotes 8 tokens or more in a row and holds every fact that was asked for."""
    holds = all(quotation.fact.lower() in answer.lower() for quotation in prompt.case.quotations)
    return holds and longest_quotation(tokenizer, answer, prompt.text) >= 8


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[list[int], str]]
) -> float:
    """Of the replies to prompts, teacher-forced: the exponential of the mean loss of their tokens."""
    total, count = 0.0, 0
    for prompt, reply in pairs:
        ids = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        total += float(functional.cross_entropy(logits.float(), torch.tensor(ids), reduction="sum"))
        count += len(ids)
    return math.exp(total / count)


def held_out_pairs(
    tokenizer: PreTrainedTokenizerBase,
    topics: Sequence[Topic],
    *,
    num_documents: int = 100,
) -> list[tuple[list[int], str]]:
    """Prompts never trained on with the replies that would be right, for :func:`perplexity`."""
    phrasings = held_out_phrasings(topics, len(topics))
    pairs = [(render(tokenizer, [("user", question)]), topic.answer) for topic, question in phrasings]
    pairs += [
        (render(tokenizer, prompt.messages), prompt.reply) for prompt in unseen_documents(num_documents)
    ]
    return pairs


__all__ = [
    "NUM_FOLLOW_UPS",
    "DocumentPrompt",
    "ReplyPrompt",
    "edit_prompts",
    "follow_up_prompts",
    "held_out_pairs",
    "held_out_phrasings",
    "longest_quotation",
    "perplexity",
    "point_prompts",
    "quotes_the_fact",
    "render",
    "repeats_ngram",
    "unseen_documents",
    "written_cases",
]
