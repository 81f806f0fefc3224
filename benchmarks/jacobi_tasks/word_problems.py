"""Arithmetic word problems, answered step by step and scored on the number at the end.

A story changes a count two to four times. The answer computes each step and ends with the result.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from benchmarks.jacobi_tasks.base import Case, Split, split_of, word_list

_NAMES = word_list("Mia Tom Lena Omar Ida Raj Eva Finn Zoe Max Nora Ben Aya Luis Kira Sam Tess Hugo")
_THINGS = word_list("apples marbles stamps books coins shells cards pencils stickers beads plums buttons")
_PACKS = ["bags", "boxes", "packs", "jars", "baskets"]
_LARGEST = 40
_LAST_NUMBER = re.compile(r"answer is (-?\d+)")


class WordProblems:
    """A story about how many things somebody has."""

    name = "word_problems"

    def make(self, rng: random.Random, split: Split) -> Case | None:
        """A story; its text decides the split."""
        name, other = rng.sample(_NAMES, 2)
        thing = rng.choice(_THINGS)
        count = rng.randrange(3, 20)
        story = [f"{name} has {count} {thing}."]
        steps = [f"{name} starts with {count} {thing}."]
        for _ in range(rng.randrange(2, 5)):
            change = rng.choice((_gain, _lose, _packs, _double, _give_each, _halve))
            made = change(rng, name, other, thing, count)
            if made is None:
                continue
            sentence, reckoning, count = made
            story.append(sentence)
            steps.append(reckoning)
        if len(steps) < 3:
            return None
        question = rng.choice(
            (
                f"How many {thing} does {name} have now?",
                f"How many {thing} does {name} have at the end?",
                f"How many {thing} are left with {name}?",
            )
        )
        prompt = " ".join([*story, question]) + "\n"
        if split_of(prompt) != split:
            return None
        return Case(prompt, " ".join([*steps, f"The answer is {count}."]), {"number": count})

    def score(self, cases: Sequence[Case], texts: Sequence[str]) -> list[bool]:
        """Whether each answer ends with the right number."""
        return [number_of(text) == case.facts["number"] for case, text in zip(cases, texts, strict=True)]


def number_of(text: str) -> int | None:
    """The number an answer ends with; ``None`` if it gives none."""
    found = _LAST_NUMBER.findall(text)
    return int(found[-1]) if found else None


_Change = tuple[str, str, int] | None


def _gain(rng: random.Random, name: str, other: str, thing: str, count: int) -> _Change:
    more = rng.randrange(2, 10)
    if count + more > _LARGEST:
        return None
    sentence = rng.choice(
        (
            f"{other} gives {name} {more} more.",
            f"{name} buys {more} {thing}.",
            f"Then {name} finds {more} more {thing}.",
        )
    )
    return (
        sentence,
        f"After getting {more} more there are {count} + {more} = {count + more} {thing}.",
        count + more,
    )


def _lose(rng: random.Random, name: str, other: str, thing: str, count: int) -> _Change:
    if count < 4:
        return None
    less = rng.randrange(1, min(count, 10))
    sentence = rng.choice(
        (
            f"{name} gives {less} to {other}.",
            f"{name} loses {less} {thing}.",
            f"Then {name} sells {less} of them.",
        )
    )
    return (
        sentence,
        f"After {less} are gone there are {count} - {less} = {count - less} {thing}.",
        count - less,
    )


def _packs(rng: random.Random, name: str, other: str, thing: str, count: int) -> _Change:
    packs, each = rng.randrange(2, 5), rng.randrange(2, 7)
    total = count + packs * each
    if total > _LARGEST:
        return None
    kind = rng.choice(_PACKS)
    sentence = rng.choice(
        (
            f"{name} buys {packs} {kind} with {each} {thing} each.",
            f"{other} brings {packs} {kind} of {each} {thing}.",
        )
    )
    reckoning = (
        f"The {kind} hold {packs} * {each} = {packs * each} {thing}, so there are "
        f"{count} + {packs * each} = {total} {thing}."
    )
    return sentence, reckoning, total


def _double(rng: random.Random, name: str, other: str, thing: str, count: int) -> _Change:
    if count * 2 > _LARGEST:
        return None
    sentence = rng.choice((f"{name} then doubles that number.", f"{other} gives {name} as many again."))
    return sentence, f"Twice as many are {count} * 2 = {count * 2} {thing}.", count * 2


def _halve(rng: random.Random, name: str, other: str, thing: str, count: int) -> _Change:
    if count % 2 or count < 4:
        return None
    sentence = rng.choice((f"{name} gives half of them to {other}.", f"Half of the {thing} get lost."))
    return sentence, f"Half of them are {count} / 2 = {count // 2} {thing}.", count // 2


def _give_each(rng: random.Random, name: str, other: str, thing: str, count: int) -> _Change:
    friends, each = rng.randrange(2, 4), rng.randrange(2, 5)
    if friends * each >= count:
        return None
    sentence = f"{name} gives {each} {thing} to each of {friends} friends."
    reckoning = (
        f"The {friends} friends get {friends} * {each} = {friends * each} {thing}, so there are "
        f"{count} - {friends * each} = {count - friends * each} {thing}."
    )
    return sentence, reckoning, count - friends * each
