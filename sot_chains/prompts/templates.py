"""The requests Skeleton-of-Thought sends: one for the skeleton, one for each point.

Small models see examples as earlier chat turns, strong ones a short request alone. If the model continues a
begun reply, it is begun for it, so that it cannot wander off. The language of the question picks the wording
and the examples, and with them the language of the answer. What all points share comes first and the point
itself last, so that a model which caches prefixes reads the shared part once.

This module knows text. It does not know messages, models or providers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from string import Formatter
from typing import get_args

from sot_chains.outline.skeleton import Point, Skeleton
from sot_chains.prompts.examples import CHINESE_EXAMPLES, ENGLISH_EXAMPLES, Detail, Example

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


_FIELDS = {  # of templates that are used as requests
    "skeleton": {"question"},
    "expansion": {"question", "skeleton", "number", "point"},
    "expansion_prefill": {"number", "point"},
    "needed": {"points"},
    "conclusion": {"question", "points"},
}


@dataclass(frozen=True)
class PromptTemplates:
    """The two requests in one language. Fields are in braces, as for ``str.format``.

    Attributes:
        skeleton: Request for the skeleton; uses ``{question}``.
        expansion: Request for one point; uses ``{question}``, ``{skeleton}``, ``{number}``, ``{point}``, and
            ``{length}`` for how long the text should be, if it likes.
        lengths: What ``{length}`` is in each level of detail.
        skeleton_needs: Added to ``skeleton`` if points may build on each other.
        needed: Added to ``expansion`` for a point that builds on others; uses ``{points}``, their text.
        conclusion: Request for what follows from all points; uses ``{question}`` and ``{points}``.
        examples: Shown to small models as earlier turns, before the request.
        skeleton_prefill: What the reply to ``skeleton`` is begun with, if the model allows it.
        expansion_prefill: What the reply to ``expansion`` is begun with; uses ``{number}``, ``{point}``.
        skeleton_opening: Added to ``skeleton`` if the reply cannot be begun for the model.
        expansion_opening: Added to ``expansion`` if the reply cannot be begun for the model.
        separator: Stands between a point's heading and its text in the finished answer.

    Raises:
        ValueError: A template misses a field or names an unknown one.
    """

    skeleton: str
    expansion: str
    lengths: Mapping[Detail, str] = field(default_factory=lambda: _ENGLISH_LENGTHS)
    skeleton_needs: str = (
        "\n\nIf a point can only be written once others are, name them behind its heading, for example "
        '"5. Total cost (needs 2, 4)". Mark no other points.'
    )
    needed: str = "\n\nYour point builds on these, which are written already:\n\n{points}"
    conclusion: str = (
        "{question}\n\nThese points of the answer are written already:\n\n{points}\n\n"
        "Write only the conclusion: in one to three sentences, the answer that follows from these points, in "
        "the language of the question."
    )
    examples: tuple[Example, ...] = ()
    skeleton_prefill: str = "1."
    expansion_prefill: str = "{number}. {point}:"
    skeleton_opening: str = '\n\nBegin your reply with "1."'
    expansion_opening: str = "\n\nBegin your reply with the first word of the explanation."
    separator: str = ": "

    def __post_init__(self) -> None:
        for name, required in _FIELDS.items():
            found = {one for _, one, _, _ in Formatter().parse(vars(self)[name]) if one}
            if found - ({"length"} if name == "expansion" else set()) != required:
                raise ValueError(
                    f"the {name} template must use exactly the fields {sorted(required)}, got "
                    f"{sorted(found)}; write literal braces as {{{{ and }}}}"
                )
        if missing := set(get_args(Detail)) - set(self.lengths):
            raise ValueError(f"lengths need an entry for {sorted(missing)}, got {sorted(self.lengths)}")

    def expansion_request(self, question: str, skeleton: Skeleton, point: Point, *, detail: Detail) -> str:
        """The text of the message that asks for ``point`` of ``skeleton`` to be written out."""
        fields = {"question": question, "skeleton": skeleton.text, "length": self.lengths[detail]}
        return self.expansion.format(**fields, number=point.number, point=point.text)

    def num_shared(self, question: str, skeleton: Skeleton, *, detail: Detail) -> int:
        """How many characters the expansion requests of all points of ``skeleton`` have in common."""
        fields = {"question": question, "skeleton": skeleton.text, "length": self.lengths[detail]}
        return self.expansion.format(**fields, number="\0", point="\0").index("\0")

    def skeleton_examples(self) -> list[tuple[str, str, str]]:
        """Requests for the skeletons of ``examples``, and the replies, which are the same begun or not."""
        return [
            (self.skeleton.format(question=one.question), one.skeleton.text, one.skeleton.text)
            for one in self.examples
        ]

    def expansion_examples(self, detail: Detail) -> list[tuple[str, str, str]]:
        """Requests for one point of each of ``examples``, the reply with its heading, and without."""
        return [
            (
                self.expansion_request(one.question, one.skeleton, one.point, detail=detail),
                f"{self.expansion_reply_start(one.point)} {one.expansion(detail)}",
                one.expansion(detail),
            )
            for one in self.examples
        ]

    def expansion_reply_start(self, point: Point) -> str:
        """What the reply to :meth:`expansion_request` is begun with."""
        return self.expansion_prefill.format(number=point.number, point=point.text)

    @cached_property
    def example_headings(self) -> frozenset[str]:
        """The headings of ``examples``, with case folded, to notice a model that copies them."""
        return frozenset(heading for example in self.examples for heading in example.skeleton.folded)


_ENGLISH_LENGTHS: dict[Detail, str] = {
    "brief": "one full sentence",
    "normal": "two to four full sentences",
    "full": "a full paragraph, with a list or code where it helps",
}

ENGLISH = PromptTemplates(
    examples=ENGLISH_EXAMPLES,
    skeleton=(
        "Write only the outline of an answer to this question, not the answer: five to eight numbered "
        "points, one a line, each a heading of two to five words that can be worked out without reading the "
        "others. Use the language of the question.\n\nQuestion: {question}"
    ),
    expansion=(
        "Outline of an answer:\n{skeleton}\n\n"
        "Several writers work on this outline at once. Write only one point of it, in {length}, as an answer "
        "to the question below and in its language.\n\n"
        "Your point is {number}. {point}\n\nQuestion: {question}"
    ),
)

CHINESE = PromptTemplates(
    skeleton_needs=(
        '\n\n如果某个要点必须等其他要点写完才能写，请在小标题后注明，例如"5. 总费用（需要 2、4）"，'
        "其他要点不要注明。"
    ),
    needed="\n\n你的要点建立在下面已经写好的要点之上：\n\n{points}",
    conclusion="{question}\n\n回答的以下要点已经写好：\n\n{points}\n\n请只写结论：用一到三句话给出由这些要点得出的答案。请使用中文。",
    lengths={
        "brief": "一句完整的话",
        "normal": "两到四句完整的话",
        "full": "一个完整的段落，必要时可以用列表或代码",
    },
    examples=CHINESE_EXAMPLES,
    skeleton=(
        "请只写出下面问题的回答提纲，不要写正文：五到八个带编号的要点，每行一个，"
        "每个是简短的小标题，不看其他要点也能单独展开。请使用中文。\n\n"
        "问题：{question}"
    ),
    expansion=(
        "回答的提纲：\n{skeleton}\n\n"
        "几位作者同时撰写这份提纲，每人只负责一个要点。请用{length}只写出其中一个要点，"
        "用中文回答下面的问题。\n\n"
        "你负责的要点是 {number}. {point}\n\n问题：{question}"
    ),
    expansion_prefill="{number}. {point}：",
    skeleton_opening="\n\n请直接以“1.”开头。",
    expansion_opening="\n\n请直接从正文的第一个字开始。",
    separator="：",
)

# For strong models: they need no examples, and every point reads its request again.
SHORT_ENGLISH = PromptTemplates(
    skeleton=(
        "{question}\n\nReply only with an outline of the answer: 5 to 8 numbered headings of two to five "
        "words, one a line, in the language of the question."
    ),
    expansion=(
        "{question}\n\nOutline:\n{skeleton}\n\nWrite only one point of it, in {length} and without a "
        "heading. Your point is {number}. {point}"
    ),
    skeleton_opening="",
    expansion_opening="",
)

SHORT_CHINESE = replace(
    CHINESE,
    examples=(),
    skeleton="{question}\n\n只回复提纲：5到8个带编号的小标题，每行一个。",
    expansion=(
        "{question}\n\n提纲：\n{skeleton}\n\n用{length}只写其中一个要点，不要小标题。"
        "你负责的要点是 {number}. {point}"
    ),
    skeleton_opening="",
    expansion_opening="",
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
        """Requests of about half the length and without examples, for strong models."""
        return cls({"en": SHORT_ENGLISH, "zh": SHORT_CHINESE})

    def for_question(self, question: str) -> PromptTemplates:
        """The templates in the language ``question`` is written in."""
        return self.templates.get(language_of(question), self.templates["en"])
