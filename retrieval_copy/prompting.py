"""Prompts of a retrieval chain, and the selection of passages from long documents.

Knows text. Does not know models or stores.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import NamedTuple

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from retrieval_copy.citations.questions import Question
from retrieval_copy.citations.sentences import placed_sentences
from retrieval_copy.citations.support import NOT_HELD

_TEXTS = tomllib.loads(files(__package__).joinpath("prompts.toml").read_text("utf-8"))
_REQUEST = _TEXTS["request"].replace("{not_held}", NOT_HELD)
_SHOWN = _TEXTS["shown"]  # small models follow what earlier turns show, and less what a request describes

ANSWER_PROMPT = ChatPromptTemplate.from_messages(
    [
        HumanMessage(_REQUEST.format(documents=_SHOWN["documents"], question=_SHOWN["question"])),
        AIMessage(_SHOWN["answer"]),
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

BOUNDS = {"max_tokens": 256, "stop": ["\nQuestion:", "\nPassages:"]}
"""Where answers to the default prompt end: small models go on with a question of their own."""

# A shorter excerpt of a document is not useful.
_MIN_EXCERPT_TOKENS = 32
# Upper bound for any tokenizer; avoids counting the tokens of texts that cannot fit.
_MOST_CHARACTERS_PER_TOKEN = 16
_GAP = "\n[...]\n"


def in_context(document: Document) -> str:
    """The text of ``document`` below a line with its title and headings, to search by."""
    path, text = map(document.metadata.get, ("title", "heading")), document.page_content
    context = f"# {' > '.join(map(str, filter(None, path)))}\n"
    return text if context == "# \n" or text.startswith(context) else context + text


class Excerpt(NamedTuple):
    """The part of a document, by its index, that the prompt shows: all of it, or its nearest sentences."""

    document: int
    text: str


def excerpts(
    texts: Sequence[str], asked: Question, *, max_tokens: int, count: Callable[[str], int]
) -> list[Excerpt]:
    """Selects the distinct texts that fit into ``max_tokens``, in order, and sentences of the next one.

    Those that answer what is ``asked`` best are preferred; ``count`` counts the tokens of a text.
    """
    shown = []
    seen = set[str]()
    for number, text in enumerate(texts):
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        if len(text) <= max_tokens * _MOST_CHARACTERS_PER_TOKEN and (num_tokens := count(text)) <= max_tokens:
            max_tokens -= num_tokens
            shown.append(Excerpt(number, text))
            continue
        part = nearest_sentences(text, asked, max_tokens, count) if max_tokens >= _MIN_EXCERPT_TOKENS else ""
        shown += [Excerpt(number, part)] if part else []
        break
    return shown


def nearest_sentences(text: str, asked: Question, max_tokens: int, count: Callable[[str], int]) -> str:
    """The sentences of ``text`` that answer what is ``asked`` best, in order, in so many tokens."""
    sentences, gap = placed_sentences(text), count(_GAP)
    chosen: list[int] = []
    for number in sorted(range(len(sentences)), key=lambda number: -asked.score(sentences[number])):
        max_tokens -= count(sentences[number].text) + gap
        if max_tokens < 0:
            break
        chosen.append(number)
    parts = [(_GAP, " ")[number - 1 in chosen] + sentences[number].text for number in sorted(chosen)]
    return "".join(parts).removeprefix(_GAP)
