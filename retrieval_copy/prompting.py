"""The requests a retrieval chain sends, and which passages of long documents they show.

Knows text. Does not know models or stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from retrieval_copy.citations import is_word, pieces

ANSWER_PROMPT = ChatPromptTemplate.from_messages(
    [
        ("placeholder", "{history}"),
        (
            "human",
            "Answer the question from the documents, and quote them word for word.\n\n"
            "{documents}\n\n"
            "Question: {question}",
        ),
    ]
)
"""Asks for the answer. Fields: ``documents``, ``question`` (which stands alone), ``asked`` (as the user put
it), ``history`` (earlier turns, as messages). A template without ``history`` leaves the earlier turns out."""

DOCUMENT_PROMPT = PromptTemplate.from_template("[{number}] {page_content}")
"""Lays out one document. Fields: ``page_content``, ``number`` (from 1), and all of the document's
metadata."""

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
"""Asks for a follow-up question that stands alone. Fields: ``conversation``, ``question``, ``history``."""

_PASSAGE_CHARACTERS = 600
# Less of a document than this says nothing.
_MIN_EXCERPT_TOKENS = 32
# No tokenizer makes fewer tokens of a text than one in so many characters; spares counting long texts.
_MOST_CHARACTERS_PER_TOKEN = 16
_GAP = "\n[...]\n"
_BREAK = re.compile(r"\n\s*\n|(?<=[.!?。！？])\s+|\n")


@dataclass(frozen=True)
class Excerpt:
    """What of one document is shown.

    Attributes:
        document: Number of the document, in the order of retrieval.
        text: All of it, or its passages nearest to the question in their order.
    """

    document: int
    text: str


def excerpts(
    texts: Sequence[str], question: str, *, max_tokens: int, count: Callable[[str], int]
) -> list[Excerpt]:
    """As many of ``texts`` as fit into ``max_tokens``, in order, each once; of the first too long, passages.

    Args:
        texts: Of the documents, in the order of retrieval.
        question: Passages that share its rarer words come first.
        max_tokens: For all together.
        count: Tells how many tokens a text has.
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
    wanted = _words(question)
    holds = [wanted & _words(passage) for passage in passages]
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
    """``text`` cut at paragraphs, sentences and lines into parts that joined are the text again."""
    ends = [match.end() for match in _BREAK.finditer(text)] + [len(text)]
    passages = []
    start = before = 0
    for end in ends:
        if end - start > _PASSAGE_CHARACTERS and before > start:
            passages.append(text[start:before])
            start = before
        while end - start > _PASSAGE_CHARACTERS:  # nowhere to cut
            passages.append(text[start : start + _PASSAGE_CHARACTERS])
            start += _PASSAGE_CHARACTERS
        before = end
    return [*passages, text[start:]] if start < len(text) else passages


def _words(text: str) -> set[str]:
    return {piece.casefold() for piece in pieces(text) if is_word(piece)}
