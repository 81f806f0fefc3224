"""The requests Skeleton-of-Thought sends: one for the skeleton, one for each point.

Two families: with assistant prefill (the reply is begun for the model, so it cannot wander off) and
without, for models that refuse a final assistant message. The language of the question picks the
wording and the demonstration, and with them the language of the answer. What all points share stands
first and the point itself last, so that a model which caches prefixes reads the shared part once.

This module knows text. It does not know messages, models or providers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter

from sot_chains.text.examples import CHINESE_EXAMPLES, ENGLISH_EXAMPLES, Example
from sot_chains.text.skeleton import Point, Skeleton

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA_OR_HANGUL = re.compile(r"[\u3040-\u30ff\uac00-\ud7af]")
_LATIN_WORD = re.compile(r"[A-Za-z]+")


def language_of(text: str) -> str:
    """``"zh"`` for text written mainly in Chinese characters, otherwise ``"en"``.

    One Chinese character counts as much as one Latin word, so that a Chinese question about
    "Python" stays Chinese. Japanese and Korean take the English wording, which asks for the
    language of the question.
    """
    if _KANA_OR_HANGUL.search(text):
        return "en"
    return "zh" if len(_HAN.findall(text)) > len(_LATIN_WORD.findall(text)) else "en"


def _check_fields(template: str, *, name: str, required: set[str]) -> None:
    found = {field_name for _, field_name, _, _ in Formatter().parse(template) if field_name}
    if found != required:
        raise ValueError(
            f"the {name} template must use exactly the fields {sorted(required)}, got {sorted(found)}; "
            "write literal braces as {{ and }}"
        )


@dataclass(frozen=True)
class PromptTemplates:
    """The two requests in one language. Fields stand in braces, as for ``str.format``.

    Attributes:
        examples: Earlier turns that show a small model what is asked for; they stand before both requests.
        skeleton_after_examples: Request for the skeleton behind ``examples``, without a demonstration of its
            own; uses ``{question}``.
        skeleton: Request for the skeleton; uses ``{question}``.
        expansion: Request for one point; uses ``{question}``, ``{skeleton}``, ``{number}``, ``{point}``.
        skeleton_prefill: What the reply to ``skeleton`` is begun with, where the model allows it.
        expansion_prefill: What the reply to ``expansion`` is begun with; uses ``{number}``, ``{point}``.
        skeleton_opening: Added to ``skeleton`` where the reply cannot be begun for the model.
        expansion_opening: Added to ``expansion`` where the reply cannot be begun for the model.
        separator: Stands between a point's heading and its text in the finished answer.

    Raises:
        ValueError: A template misses a field or names an unknown one.
    """

    skeleton: str
    expansion: str
    examples: tuple[Example, ...] = ()
    skeleton_after_examples: str = "{question}"
    skeleton_prefill: str = "1."
    expansion_prefill: str = "{number}. {point}:"
    skeleton_opening: str = '\n\nBegin your reply with "1."'
    expansion_opening: str = "\n\nBegin your reply with the first word of the explanation."
    separator: str = ": "

    def __post_init__(self) -> None:
        _check_fields(self.skeleton, name="skeleton", required={"question"})
        _check_fields(self.skeleton_after_examples, name="skeleton_after_examples", required={"question"})
        _check_fields(self.expansion, name="expansion", required={"question", "skeleton", "number", "point"})
        _check_fields(self.expansion_prefill, name="expansion_prefill", required={"number", "point"})

    def skeleton_request(self, question: str, *, prefill: bool) -> str:
        """The text of the message that asks for the skeleton of an answer to ``question``."""
        request = self.skeleton.format(question=question)
        return request if prefill else request + self.skeleton_opening

    def expansion_request(self, question: str, skeleton: Skeleton, point: Point, *, prefill: bool) -> str:
        """The text of the message that asks for ``point`` of ``skeleton`` to be written out."""
        request = self.expansion.format(
            question=question, skeleton=skeleton.text, number=point.number, point=point.text
        )
        return request if prefill else request + self.expansion_opening

    def skeleton_examples(self) -> list[tuple[str, str]]:
        """Requests for the skeletons of ``examples``, and replies."""
        return [
            (self.skeleton_after_examples.format(question=example.question), example.skeleton.text)
            for example in self.examples
        ]

    def expansion_examples(self) -> list[tuple[str, str]]:
        """Requests for one point of each of ``examples``, and replies."""
        return [
            (
                self.expansion_request(example.question, example.skeleton, example.point, prefill=True),
                f"{self.expansion_reply_start(example.point)} {example.text}",
            )
            for example in self.examples
        ]

    def expansion_reply_start(self, point: Point) -> str:
        """What the reply to :meth:`expansion_request` is begun with."""
        return self.expansion_prefill.format(number=point.number, point=point.text)


ENGLISH = PromptTemplates(
    examples=ENGLISH_EXAMPLES,
    skeleton_after_examples=(
        "Write only the outline of an answer to this question, not the answer: 3 to 10 numbered points, "
        "one a line, each a heading of two to five words. Use the language of the question.\n\n"
        "Question: {question}"
    ),
    skeleton=(
        "Write only the outline of an answer to the question below, not the answer. Give 3 to 10 numbered "
        "points, one a line, each a heading of two to five words that can be worked out without reading the "
        "others. Use the language of the question.\n\n"
        "An outline for another question, how to keep a houseplant alive, would be:\n"
        "1. Enough daylight\n2. Careful watering\n3. Fresh soil each spring\n4. Signs of pests\n\n"
        "Now the outline for this question: {question}"
    ),
    expansion=(
        "Question: {question}\n\n"
        "Outline of the answer:\n{skeleton}\n\n"
        "Several writers work on this outline at once and each takes one point. "
        "Write out your point in one or two full sentences, in the language of the question. "
        "Leave the other points alone, do not repeat the heading, and add no introduction.\n\n"
        "Your point is {number}. {point}"
    ),
)

CHINESE = PromptTemplates(
    examples=CHINESE_EXAMPLES,
    skeleton_after_examples=(
        "请只写出下面问题的回答提纲，不要写正文：3到10个带编号的要点，每行一个，每个是简短的小标题。\n\n"
        "问题：{question}"
    ),
    skeleton=(
        "问题：{question}\n\n"
        "请只写出回答的提纲，不要写正文。列出3到10个带编号的要点，每行一个，"
        "每个要点是一个简短的小标题，不看其他要点也能单独展开。请使用中文。\n\n"
        "例如，对于“怎样养好室内植物”这个问题，提纲可以是：\n"
        "1. 充足的光照\n2. 适量浇水\n3. 每年春天换土\n4. 留意虫害\n\n"
        "现在请为上面的问题写提纲。"
    ),
    expansion=(
        "问题：{question}\n\n"
        "回答的提纲：\n{skeleton}\n\n"
        "几位作者同时撰写这份提纲，每人只负责一个要点。请用一两句完整的话写出你负责的要点，使用中文，"
        "不要涉及其他要点，不要重复小标题，也不要加开场白。\n\n"
        "你负责的要点是 {number}. {point}"
    ),
    expansion_prefill="{number}. {point}：",
    skeleton_opening="\n\n请直接以“1.”开头。",
    expansion_opening="\n\n请直接从正文的第一个字开始。",
    separator="：",
)

# For strong models: they need no demonstration, and every point reads its request again.
SHORT_ENGLISH = PromptTemplates(
    skeleton=(
        "{question}\n\nReply only with an outline of the answer: 3 to 8 numbered headings of two to five "
        "words, one a line, in the language of the question."
    ),
    expansion=(
        "{question}\n\nOutline:\n{skeleton}\n\nIn one or two sentences and without a heading, write only "
        "point {number}. {point}"
    ),
    skeleton_opening="",
    expansion_opening="",
)

SHORT_CHINESE = PromptTemplates(
    skeleton="{question}\n\n只回复提纲：3到8个带编号的小标题，每行一个。",
    expansion="{question}\n\n提纲：\n{skeleton}\n\n用一两句话只写这一要点，不要小标题：{number}. {point}",
    expansion_prefill="{number}. {point}：",
    skeleton_opening="",
    expansion_opening="",
    separator="：",
)


@dataclass(frozen=True)
class Prompts:
    """The templates by language. Replace them to phrase the requests your own way.

    Attributes:
        templates: From what ``language`` answers to :class:`PromptTemplates`; ``"en"`` is the fallback.
    """

    templates: Mapping[str, PromptTemplates] = field(default_factory=lambda: {"en": ENGLISH, "zh": CHINESE})

    def __post_init__(self) -> None:
        if "en" not in self.templates:
            raise ValueError(f"prompts need an 'en' entry to fall back to, got {sorted(self.templates)}")

    @classmethod
    def short(cls) -> Prompts:
        """Requests of about a third of the length, for strong models."""
        return cls({"en": SHORT_ENGLISH, "zh": SHORT_CHINESE})

    def for_question(self, question: str) -> PromptTemplates:
        """The templates in the language ``question`` is written in."""
        return self.templates.get(language_of(question), self.templates["en"])
