"""Prompts of a retrieval chain, and the selection of passages from long documents.

Knows text. Does not know models or stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate

from retrieval_copy.citations.support import NOT_HELD
from retrieval_copy.citations.words import terms

_REQUEST = (
    "Answer the question in one to three sentences. Quote the passages word for word where you can. "
    f'If they do not hold the answer, say "{NOT_HELD}"\n\n'
    "Passages:\n\n{documents}\n\nQuestion: {question}"
)

# Small models follow what earlier turns show, and less what a request describes.
_SHOWN_DOCUMENTS = (
    "[1] Most hedgehogs weigh less than a kilogram and live for about three years. They sleep through the "
    "winter under leaves.\n\n"
    "[2] Hedgehogs eat mainly beetles, caterpillars and earthworms, which they find by smell at night. In "
    "gardens they also take slugs and fallen fruit.\n\n"
    "[3] In search of food a hedgehog may walk two kilometres in one night."
)
_SHOWN_QUESTION = "what do hedgehogs eat and how do they find it?"
_SHOWN_ANSWER = (
    "Hedgehogs eat mainly beetles, caterpillars and earthworms, which they find by smell at night. In "
    "gardens they also take slugs and fallen fruit. In search of food a hedgehog may walk two kilometres in "
    "one night."
)

ANSWER_PROMPT = ChatPromptTemplate.from_messages(
    [
        HumanMessage(_REQUEST.format(documents=_SHOWN_DOCUMENTS, question=_SHOWN_QUESTION)),
        AIMessage(_SHOWN_ANSWER),
        ("placeholder", "{history}"),
        ("human", _REQUEST),
    ]
)
"""Asks for the answer, after a demonstration. Fields: ``documents``, ``question`` (standalone), ``asked``
(the user's wording), ``history`` (earlier turns, as messages). A template without ``history`` omits the
earlier turns."""

DOCUMENT_PROMPT = PromptTemplate.from_template("[{number}] {page_content}")
"""Formats one document. Fields: ``page_content``, ``number`` (from 1), and all metadata of the
document."""

CONDENSE_PROMPT = ChatPromptTemplate.from_messages(
    [
        (
            "human",
            "Conversation so far:\n{conversation}\n\n"
            "Follow-up question: {question}\n\n"
            "Write the follow-up question so that it can be understood without the conversation.",
        )
    ]
)
"""Asks for a standalone follow-up question. Fields: ``conversation``, ``question``, ``history``."""

QUOTE_REQUEST = (
    f"Quote the sentence of the passages that answers the question. If there is none, say: {NOT_HELD}"
)
"""Asks again after an answer that the passages do not support."""

ANSWER_TOKENS = 256
"""The longest answer to the default prompt."""

# Where a small model goes on with a question of its own.
_STOP = ("\nQuestion:", "\nPassages:")

_PASSAGE_CHARACTERS = 600
# A shorter excerpt of a document is not useful.
_MIN_EXCERPT_TOKENS = 32
# Upper bound for any tokenizer; avoids counting the tokens of texts that cannot fit.
_MOST_CHARACTERS_PER_TOKEN = 16
_GAP = "\n[...]\n"
_BREAK = re.compile(r"(\n\s*\n|(?<=[.!?。！？])\s+|\n)")


def bounds(prompt: BasePromptTemplate[Any]) -> dict[str, Any]:
    """Where answers to ``prompt`` end: the default one asks for a few sentences, others for anything."""
    return {"max_tokens": ANSWER_TOKENS, "stop": list(_STOP)} if prompt is ANSWER_PROMPT else {}


class Excerpt(NamedTuple):
    """The part of a document, by its index, that the prompt shows: all of it, or its nearest passages."""

    document: int
    text: str


def excerpts(
    texts: Sequence[str], question: str, *, max_tokens: int, count: Callable[[str], int]
) -> list[Excerpt]:
    """Selects the distinct texts that fit into ``max_tokens``, in order, and passages of the next one.

    Passages that share the rarer words of ``question`` are preferred; ``count`` counts the tokens of a text.
    """
    shown = []
    seen = set[str]()
    rest = max_tokens
    for number, text in enumerate(texts):
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        if len(text) <= rest * _MOST_CHARACTERS_PER_TOKEN and (num_tokens := count(text)) <= rest:
            rest -= num_tokens
            shown.append(Excerpt(number, text))
            continue
        if rest >= _MIN_EXCERPT_TOKENS and (part := _nearest_passages(text, question, rest, count)):
            shown.append(Excerpt(number, part))
        break
    return shown


def _nearest_passages(text: str, question: str, max_tokens: int, count: Callable[[str], int]) -> str:
    passages = _passages(text)
    wanted = set(terms(question))
    holds = [wanted.intersection(terms(passage)) for passage in passages]
    frequency = {word: sum(word in held for held in holds) for word in wanted}
    scores = [sum(1 / frequency[word] for word in held) for held in holds]
    chosen: list[int] = []
    rest = max_tokens
    gap = count(_GAP)
    for number in sorted(range(len(passages)), key=lambda number: (-scores[number], number)):
        num_tokens = count(passages[number]) + gap
        if num_tokens > rest:
            break
        rest -= num_tokens
        chosen.append(number)
    parts: list[str] = []
    for number in sorted(chosen):
        if parts and number - 1 not in chosen:
            parts.append(_GAP)
        parts.append(passages[number])
    return "".join(parts).strip()


def _passages(text: str) -> list[str]:
    """Splits ``text`` at paragraphs, sentences and lines; the joined parts equal the text."""
    passages = [""]
    for part in filter(None, _BREAK.split(text)):
        for start in range(0, len(part), _PASSAGE_CHARACTERS):
            piece = part[start : start + _PASSAGE_CHARACTERS]
            if len(passages[-1]) + len(piece) > _PASSAGE_CHARACTERS:
                passages.append("")
            passages[-1] += piece
    return passages
