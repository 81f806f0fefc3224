"""Prompts of a retrieval chain, and the selection of passages from long documents.

Knows text. Does not know models or stores.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files

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

# Upper bound for any tokenizer; avoids counting the tokens of texts that cannot fit.
_MOST_CHARACTERS_PER_TOKEN = 16
_GAP = "\n[...]\n"


def in_context(document: Document) -> str:
    """The text of ``document`` below a line with its title and headings, to search by."""
    path, text = map(document.metadata.get, ("title", "heading")), document.page_content
    context = f"# {' > '.join(map(str, filter(None, path)))}\n"
    return text if context == "# \n" or text.startswith(context) else context + text


def path_of(text: str) -> str:
    """The line of title and headings that ``text`` begins with, if it does."""
    return text[: text.find("\n") + 1] if text.startswith("# ") else ""


def excerpts(
    texts: Sequence[str], asked: Question, *, max_tokens: int, count: Callable[[str], int]
) -> dict[int, str]:
    """The distinct texts that fit into ``max_tokens``, by index and in order, and sentences of the next.

    Those that answer what is ``asked`` best are preferred; ``count`` counts the tokens of a text.
    """
    shown: dict[int, str] = {}
    for number, text in enumerate(texts):
        if not text.strip() or text in shown.values():
            continue
        if len(text) <= max_tokens * _MOST_CHARACTERS_PER_TOKEN and (num_tokens := count(text)) <= max_tokens:
            max_tokens -= num_tokens
            shown[number] = text
            continue
        part = nearest_sentences(text, asked, max_tokens, count)
        return shown | ({number: part} if part else {})
    return shown


def nearest_sentences(text: str, asked: Question, max_tokens: int, count: Callable[[str], int]) -> str:
    """The sentences of ``text`` that answer what is ``asked`` best, below its path, in so many tokens."""
    parts, path, gap = placed_sentences(text), path_of(text), count(_GAP)
    chosen, max_tokens = list[int](), max_tokens - count(path)
    below = [number for number, part in enumerate(parts) if part.text not in path]
    for number in sorted(below, key=lambda number: -asked.score(parts[number])):
        max_tokens -= count(parts[number].text) + gap
        if max_tokens < 0:
            break
        chosen.append(number)
    shown = "".join((_GAP, "\n")[number - 1 in chosen] + parts[number].text for number in sorted(chosen))
    return path * bool(shown) + shown.removeprefix(_GAP)
