"""Mistakes of an answer that can be counted without a judge: copied outlines, overrun points, loops."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise

from sot_chains.calls.trace import SotTrace
from sot_chains.prompts.profile import CHINESE, ENGLISH

_NUMBER = re.compile(r"^[#*\s(（]*(\d{1,2})[*]*[.)）、．](?!\d)", re.MULTILINE)
_EXAMPLE_HEADINGS = ENGLISH.example_headings | CHINESE.example_headings
_NUM_WORDS, _NUM_REPEATS, _MOST_MORE = 8, 3, 60
_ITEM = re.compile(r"(?:^|\s)[(*]{0,3}(\d{1,2})[*]*[.)]\s")
TEXT_FAULTS = ("dangling", "list_in_line", "alike", "bad_headings", "other_language")
_MOST_ALIKE, _LONGEST_HEADING = 0.6, 8
_FUNCTION_WORDS = {
    "en": "the and of to is that with for are you it this how what why do can",
    "de": "der die das und ist nicht mit ein eine sie zu auf",
    "fr": "le la les et est des une pour que dans vous qui",
    "es": "el los las y es una para que por con del se",
    "pt": "o os as e uma para que com do da não em",
    "it": "il gli e è una per che di non con del sono",
}


def count_mistakes(question: str, text: str, trace: SotTrace) -> dict[str, int]:
    """How often each mistake was made; by Skeleton-of-Thought except for ``"looped"``.

    Args:
        question: The question.
        text: The answer.
        trace: Its trace.
    """
    is_sot, skeleton = trace["route"] == "sot", trace["skeleton"]
    return {
        "echoed": int(is_sot and is_echoed(skeleton)),
        "overrun": sum(is_overrun(point["number"], point["text"], skeleton) for point in trace["points"]),
        "empty": sum(not point["text"].strip() for point in trace["points"]),
        "looped": int(is_looped(text)),
        **count_text_faults(question, [(point["label"], point["text"]) for point in trace["points"]]),
    }


def count_text_faults(question: str, points: Sequence[tuple[str, str]]) -> dict[str, int]:
    """How many points, given as ``(heading, text)``, have each fault that a reader notices."""
    texts = [text for _, text in points]
    return {
        "dangling": sum(text.rstrip(" *").endswith((":", "：", ",", "，", ";")) for text in texts),
        "list_in_line": sum(has_list_in_line(text) for text in texts),
        "alike": sum(rouge_l(*pair) > _MOST_ALIKE for pair in combinations(texts, 2)),
        "bad_headings": sum(is_bad_heading(heading) for heading, _ in points),
        "other_language": sum(
            language(heading + " " + text) != language(question) for heading, text in points if text.strip()
        ),
    }


def without_loop(text: str) -> str:
    """``text`` up to its first repetition, if the same eight words occur three times."""
    if not is_looped(text):
        return text
    words = list(re.finditer(r"\S+", text))
    seen = set()
    for start in range(len(words) - _NUM_WORDS + 1):
        run = tuple(word[0].casefold() for word in words[start : start + _NUM_WORDS])
        if run in seen:
            return text[: words[start].start()]
        seen.add(run)
    return text


def has_list_in_line(text: str) -> bool:
    """Whether a line holds two items of a numbered list or more."""
    for line in text.splitlines():
        numbers = [int(found[1]) for found in _ITEM.finditer(line)]
        if any(second == first + 1 for first, second in pairwise(numbers)):
            return True
    return False


def rouge_l(one: str, other: str) -> float:
    """The F measure of the longest common subsequence of words (Lin, 2004)."""
    words, others = (re.findall(r"[^\W_]+", text.casefold()) for text in (one, other))
    row = [0] * (len(others) + 1)
    for word in words:
        before = 0
        for position, another in enumerate(others, 1):
            above = row[position]
            row[position] = before + 1 if word == another else max(above, row[position - 1])
            before = above
    return 2 * row[-1] / max(1, len(words) + len(others))


def is_bad_heading(heading: str) -> bool:
    """Whether a heading is a sentence: longer than eight words, or with a sentence's end in it."""
    return len(heading.split()) > _LONGEST_HEADING or bool(re.search(r"[.!。！](?:\s|\W*$)", heading))


def language(text: str) -> str:
    """The script that most letters of ``text`` have and, for Latin ones, the language, as far as known."""
    names = [unicodedata.name(letter, "").split(" ")[0] for letter in text if letter.isalpha()]
    script = Counter(names).most_common(1)[0][0] if names else ""
    if script != "LATIN":
        return script
    words = Counter(re.findall(r"[^\W_]+", text.casefold()))
    scores = {one: sum(words[word] for word in known.split()) for one, known in _FUNCTION_WORDS.items()}
    return max(scores, key=lambda one: scores[one])


def is_looped(text: str) -> bool:
    """Whether the same eight words occur three times."""
    words = text.casefold().split()
    counts = Counter(tuple(words[start : start + _NUM_WORDS]) for start in range(len(words) - _NUM_WORDS + 1))
    return max(counts.values(), default=0) >= _NUM_REPEATS


def is_echoed(skeleton: Sequence[str]) -> bool:
    """Whether most headings of an outline are those of the examples."""
    return 2 * sum(heading.casefold() in _EXAMPLE_HEADINGS for heading in skeleton) >= max(1, len(skeleton))


def is_overrun(number: int, text: str, skeleton: Sequence[str]) -> bool:
    """Whether the text of a point goes on to another one: by its number and heading, or its heading alone."""
    others = [
        heading.casefold() for position, heading in enumerate(skeleton, 1) if heading and position != number
    ]
    for line in text.splitlines()[1:]:
        body = re.sub(_NUMBER, "", line).strip(" *#:").casefold()
        if any(body.startswith(other) and len(body) <= len(other) + _MOST_MORE for other in others):
            return True
    return False
