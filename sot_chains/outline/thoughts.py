"""Thoughts that build on each other, as a user gives them. Knows text; does not know models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from string import Formatter

from pydantic import BaseModel, ConfigDict, Field

from sot_chains.outline.skeleton import Point


class Thought(BaseModel):
    """One part of an answer, written by one model call.

    Attributes:
        name: Its heading in the answer, which others refer to.
        prompt: The request. ``{question}`` stands for the user's question, and the name of another thought in
            braces for that thought's text, e.g. ``"Add up: {Costs}"``. Write literal braces as ``{{`` and
            ``}}``.
        needs: Further thoughts that are written before, and shown after the prompt.
    """

    model_config = ConfigDict(frozen=True)

    name: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    needs: tuple[str, ...] = ()

    @property
    def start(self) -> str:
        """What the reply is begun with, if the model allows it."""
        return f"{self.name}:"

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of thoughts in the prompt."""
        found = [name for _, name, _, _ in Formatter().parse(self.prompt) if name is not None]
        return tuple(dict.fromkeys(name for name in found if name != "question"))

    @property
    def all_needs(self) -> tuple[str, ...]:
        """The names of all thoughts that are written before this one."""
        return tuple(dict.fromkeys((*self.fields, *self.needs)))

    def request(self, question: str, texts: Mapping[str, str]) -> str:
        """The prompt with the question, and with the texts of the thoughts it builds on, by their names."""
        values = {**texts, "question": question}
        filled = "".join(
            text + (values[name] if name is not None else "")
            for text, name, _, _ in Formatter().parse(self.prompt)
        )
        shown = [f"{name}: {text}" for name, text in texts.items() if name not in self.fields]
        return "\n\n".join([filled, *shown])


def numbered(thoughts: Sequence[Thought]) -> tuple[Point, ...]:
    """The thoughts as points, with the numbers of those they build on.

    Raises:
        ValueError: There is none, a name stands twice or is unknown, or thoughts need each other in a circle.
    """
    if not thoughts:
        raise ValueError("a graph needs at least one thought")
    numbers: dict[str, int] = {}
    for number, thought in enumerate(thoughts, 1):
        if numbers.setdefault(thought.name, number) != number:
            raise ValueError(f"two thoughts are named {thought.name!r}: give each a name of its own")
    for thought in thoughts:
        if unknown := [name for name in thought.all_needs if name not in numbers]:
            raise ValueError(
                f"{thought.name!r} builds on {unknown}, but there are only {sorted(numbers)}, and "
                "{question} in prompts"
            )
    try:
        TopologicalSorter({thought.name: thought.all_needs for thought in thoughts}).prepare()
    except CycleError as error:
        raise ValueError(f"thoughts build on each other in a circle: {' <- '.join(error.args[1])}") from None
    return tuple(
        Point(number, thought.name, tuple(sorted(numbers[name] for name in thought.all_needs)))
        for number, thought in enumerate(thoughts, 1)
    )


def mermaid(points: Sequence[Point]) -> str:
    """A flowchart of points and what they build on, in the language of Mermaid."""
    lines = ["flowchart TD"]
    for point in points:
        label = re.sub(r"[\"#&<>\n]", lambda match: f"#{ord(match[0])};", point.text)
        lines.append(f'    n{point.number}["{label}"]')
    lines += [f"    n{need} --> n{point.number}" for point in points for need in point.needs]
    return "\n".join(lines)


@dataclass(frozen=True)
class GraphExample:
    """A small graph that is written, shown to small models as earlier turns.

    Attributes:
        question: The question.
        written: Its thoughts, each with its text.
        conclusion: What follows from them.
    """

    question: str
    written: tuple[tuple[Thought, str], ...]
    conclusion: str

    @property
    def texts(self) -> list[str]:
        """The texts of the thoughts."""
        return [text for _, text in self.written]

    @property
    def text(self) -> str:
        """The thoughts with their texts, one after the other."""
        written = enumerate(self.written, 1)
        return "\n\n".join(f"{number}. {thought.name}: {text}" for number, (thought, text) in written)

    def turns(self, *, is_begun: bool) -> list[tuple[str, str]]:
        """The requests for the thoughts, and the replies, with what each is begun with if it ``is_begun``."""
        texts = {thought.name: text for thought, text in self.written}
        return [
            (
                thought.request(self.question, {name: texts[name] for name in thought.all_needs}),
                f"{thought.start} {text}" if is_begun else text,
            )
            for thought, text in self.written
        ]


# Two of each, of different matters: a tiny model copies what it has seen once.
GRAPH_EXAMPLES = {
    "en": (
        GraphExample(
            "How do I plan a picnic for six people?",
            (
                (
                    Thought(name="Drinks", prompt="{question} Name two drinks to bring and say why."),
                    "Two good drinks for a picnic are lemonade and mint tea. Lemonade is cheap to make at "
                    "home, and almost everybody likes it, children included. Mint tea stays fresh in a "
                    "flask for hours and needs no ice, so that it is still good when the lemonade is gone.",
                ),
                (
                    Thought(
                        name="Order",
                        prompt="{question} These are the drinks: {Drinks}\n\nWrite which to drink when.",
                    ),
                    "Start with the lemonade, because it tastes best while it is cold, and six people are "
                    "thirsty after the walk. Keep the mint tea in its flask until the meal is over. It is "
                    "still fresh then, and goes well with the fruit.",
                ),
            ),
            "A picnic for six people needs no more to drink than lemonade and mint tea. Serve the lemonade "
            "on arrival, while it is cold, and the mint tea with the fruit.",
        ),
        GraphExample(
            "How do I keep a houseplant alive?",
            (
                (
                    Thought(name="Watering", prompt="{question} Write when to water it and why."),
                    "Water a houseplant only when its upper soil feels dry, because roots that stand in "
                    "water rot. Push a finger into the pot: if soil sticks to it, wait another day or two. "
                    "In winter most houseplants need less, since they hardly grow then.",
                ),
                (
                    Thought(
                        name="Holidays",
                        prompt="{question} On watering: {Watering}\n\nWrite what to do before a holiday.",
                    ),
                    "Since roots rot in water, do not leave a full saucer behind when you travel. Ask a "
                    "neighbour to push a finger into the pot twice a week, and to water only when the upper "
                    "soil feels dry. A winter holiday is easier, because the plant hardly grows then.",
                ),
            ),
            "Your houseplant stays alive if its soil is tested before each watering, by you or by a "
            "neighbour. Too much water harms it more than a dry week.",
        ),
    ),
    "zh": (
        GraphExample(
            "怎样准备六个人的野餐？",
            (
                (
                    Thought(name="饮料", prompt="{question}说出两种要带的饮料和理由。"),
                    "野餐可以带柠檬水和薄荷茶。柠檬水在家就能做，便宜，大人孩子都喜欢。薄荷茶不用加冰，放在"
                    "保温瓶里几个小时都很新鲜，柠檬水喝完了还有它。",
                ),
                (
                    Thought(name="顺序", prompt="{question}饮料如下：{饮料}\n\n写出什么时候喝哪一种。"),
                    "先喝柠檬水，因为它冰的时候最好喝，而且六个人走到地方都渴了。薄荷茶留在保温瓶里，饭后再"
                    "喝，那时它仍然新鲜，配水果正好。",
                ),
            ),
            "六个人的野餐有柠檬水和薄荷茶就够了。到达时喝冰的柠檬水，饭后配水果喝薄荷茶。",
        ),
        GraphExample(
            "怎样养好室内植物？",
            (
                (
                    Thought(name="浇水", prompt="{question}写出什么时候浇水和理由。"),
                    "室内植物要等表层土壤干了再浇水，因为根泡在水里会腐烂。把手指插进土里，如果土粘手，就再"
                    "等一两天。冬天植物几乎不生长，需要的水更少。",
                ),
                (
                    Thought(name="假期", prompt="{question}浇水的要点：{浇水}\n\n写出假期前要做什么。"),
                    "因为根泡在水里会腐烂，出门前不要在托盘里留水。请邻居每周两次用手指试一试，表层土壤干了"
                    "才浇。冬天出门更省心，因为植物几乎不生长。",
                ),
            ),
            "只要每次浇水前先试一试土，不管是自己还是邻居来做，植物就能养好。水太多比干一周更伤根。",
        ),
    ),
}
