"""Inputs for benchmarks on any model: common questions, documents, and answers that quote them.

The documents are the chapters of the language reference that ``help()`` shows, which every Python has.
Nothing here depends on what a model has memorised. Knows text. Does not know models.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from local_backend.offline.jsonl import read_lines

VICUNA = Path(__file__).parents[2] / "shared" / "data" / "questions" / "vicuna80.jsonl"
"""The 80 questions of the Skeleton-of-Thought paper, if available."""

# What follows "How can I" and "What is the best way to".
_TASKS = (
    "save money every month",
    "learn a new language",
    "sleep better at night",
    "prepare for a job interview",
    "start a small vegetable garden",
    "deal with stress at work",
    "keep a bicycle in good condition",
    "write a convincing letter of complaint",
    "teach a child to swim",
    "choose a laptop for studying",
    "reduce waste at home",
    "train for a long run",
    "organise a birthday party",
    "understand a difficult book",
    "make friends in a new city",
    "cook for many guests",
    "protect my online accounts",
    "repaint a room",
    "take better photographs",
    "spend less time on my phone",
    "look after an old dog",
    "plan a trip by train",
    "give a speech without fear",
    "keep houseplants alive",
)
_MIN_SENTENCES, _MAX_SENTENCE_CHARACTERS = 6, 300
_LEADS = ("On this the documents say:", "One of them adds:", "Then:", "It also holds that", "Besides,")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """``--model``, the same in every benchmark; pass it to ``ChatLocal.from_pretrained``."""
    parser.add_argument("--model", help="folder, GGUF file or hub name (the default model)")


def questions(count: int | None = None, path: Path | None = None) -> list[str]:
    """Open questions, the same ones each time.

    Args:
        count: Maximum number of questions.
        path: JSON lines with a ``question`` each; by default the paper's or, if they are missing, our own.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: The file holds no question.
    """
    if path is None and not VICUNA.exists():
        return [f"How can I {task}?" for task in _TASKS][:count]
    found = [str(line.record()["question"]) for line in read_lines(path or VICUNA)][:count]
    if not found:
        raise ValueError(f"{path} holds no question")
    return found


def question_pairs(count: int) -> list[tuple[str, str]]:
    """The same question in two wordings."""
    return [(f"How can I {task}?", f"What is the best way to {task}?") for task in _TASKS][:count]


@dataclass(frozen=True)
class Chapter:
    """A document.

    Attributes:
        title: What it is about, e.g. "The assert statement".
        sentences: Its prose, sentence by sentence, without tables and programs.
    """

    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The document's text."""
        return " ".join(self.sentences)


@cache
def chapters() -> tuple[Chapter, ...]:
    """The chapters with enough prose, in alphabetical order."""
    from pydoc_data.topics import topics

    found = []
    for _, text in sorted(topics.items()):
        heading, _, body = text.lstrip().partition("\n")
        paragraphs = [
            " ".join(paragraph.split())
            for paragraph in re.split(r"\n\s*\n", body)
            if re.match(r"[A-Z]", paragraph) and "::" not in paragraph
        ]
        sentences = tuple(
            sentence
            for paragraph in paragraphs
            for sentence in re.split(r"(?<=[.?!]) (?=[A-Z])", paragraph)
            if sentence.endswith(".") and 30 < len(sentence) < _MAX_SENTENCE_CHARACTERS
        )
        if len(sentences) >= _MIN_SENTENCES:
            found.append(Chapter(heading.replace('"', "").strip(), sentences))
    return tuple(found)


def quoting_answer(rng: random.Random) -> tuple[list[str], str]:
    """Documents, and an answer that quotes passages from them with a few other words between."""
    chosen = rng.sample(chapters(), 3)
    parts = []
    for chapter in chosen:
        first = rng.randrange(min(len(chapter.sentences), 8) - 1)
        passage = " ".join(chapter.sentences[first : first + 2])
        parts.append(f"{rng.choice(_LEADS)} {altered(passage, rng, share=0.02)}")
    return [" ".join(chapter.sentences[:8]) for chapter in chosen], " ".join(parts)


def edited_answer(rng: random.Random) -> tuple[list[str], str]:
    """An earlier answer, and a version with one sentence removed, one moved and some words changed."""
    sentences = list(rng.choice(chapters()).sentences[:8])
    edited = list(sentences)
    del edited[rng.randrange(len(edited))]
    edited.append(edited.pop(rng.randrange(len(edited) - 1)))
    return [" ".join(sentences)], altered(" ".join(edited), rng, share=0.04)


def altered(text: str, rng: random.Random, share: float) -> str:
    """``text`` with ``share`` of its words replaced by words drawn from it."""
    words = text.split(" ")
    return " ".join(rng.choice(words) if rng.random() < share else word for word in words)


def document_request(rng: random.Random) -> list[dict[str, str]]:
    """Chat turns that show three documents and ask about one of them."""
    chosen = rng.sample(chapters(), 3)
    documents = "\n\n".join(" ".join(chapter.sentences[:8]) for chapter in chosen)
    question = f"What do the documents say about {rng.choice(chosen).title}? Quote them."
    return [{"role": "user", "content": f"{documents}\n\n{question}"}]


def edit_request(rng: random.Random) -> list[dict[str, str]]:
    """Chat turns with an answer, and a request to repeat it with a small change."""
    chapter = rng.choice(chapters())
    answer = " ".join(chapter.sentences[:5])
    old = rng.choice([word for word in re.findall(r"[a-z]+", answer) if len(word) > 4])
    request = rng.choice(
        (
            f'Write this answer again, with "quartz" in place of "{old}".',
            "Write this answer again without its second sentence.",
            "Write this answer again, one sentence a line.",
        )
    )
    return [
        {"role": "user", "content": f"What do you know about {chapter.title}?"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": request},
    ]


def repeats_itself(token_ids: Sequence[int], *, ngram_size: int = 16, times: int = 3) -> bool:
    """Whether an answer repeats itself, which makes it easy to copy and worthless.

    Args:
        token_ids: The answer.
        ngram_size: Length of a repeated n-gram.
        times: How often the same n-gram must occur.
    """
    counts: dict[tuple[int, ...], int] = {}
    for start in range(len(token_ids) - ngram_size + 1):
        key = tuple(token_ids[start : start + ngram_size])
        counts[key] = counts.get(key, 0) + 1
        if counts[key] >= times:
            return True
    return False
