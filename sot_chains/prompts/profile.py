"""The requests that are sent, and how a kind of model is asked: requests, bounds and filters, as data.

Small models see examples as earlier chat turns, strong ones a short request alone. If the model continues a
begun reply, it is begun for it, so that it cannot wander off. The language of the question picks the wording
and the examples, and with them the language of the answer. What all points share comes first and the point
itself last, so that a model which caches prefixes reads the shared part once.

No mechanism asks for a model's size. Which profile suits a model better is measured by
``python -m benchmarks.sot_models``. This module knows text. It does not know messages, models or providers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from itertools import takewhile
from string import Formatter
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from sot_chains.outline.skeleton import Point, Skeleton
from sot_chains.outline.words import SENTENCE_END

Detail: TypeAlias = Literal["brief", "normal", "full"]
# A request and a reply that is begun for the model, and the same for one that is not.
Turns: TypeAlias = tuple[tuple[str, str], tuple[str, str]]

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


def load_data(name: str) -> dict[str, Any]:
    """Data beside this module: what models are asked in the language ``name``, or ``"profiles"``."""
    return tomllib.loads(files("sot_chains.prompts").joinpath(f"{name}.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Example:
    """A question with the skeleton of its answer and one point written out, shown as an earlier chat turn."""

    question: str
    skeleton: Skeleton
    number: int  # of the expanded point
    text: str  # its expansion

    @property
    def point(self) -> Point:
        """The expanded point."""
        return self.skeleton.points[self.number - 1]

    def expansion(self, detail: Detail) -> str:
        """The expansion in a level of detail."""
        end = SENTENCE_END.search(self.text) if detail == "brief" else None
        return self.text[: end.end()] if end else self.text


_ENGLISH = load_data("en")["small"]
_FIELDS = load_data("profiles")["fields"]  # of templates that are used as requests
_OPTIONAL = {"skeleton", "length"}  # of "expansion"


@dataclass(frozen=True)
class PromptTemplates:
    """The two requests in one language. Fields are in braces, as for ``str.format``.

    Attributes:
        skeleton: Request for the skeleton; uses ``{question}``.
        expansion: Request for one point; uses ``{question}`` and, if it likes, ``{skeleton}``, and
            ``{length}`` for how long the text should be.
        expansion_point: Says which point, by ``{number}`` and ``{point}``, if ``expansion`` does not; added
            only if the reply cannot be begun with it, so that all points have one request.
        lengths: What ``{length}`` is in each level of detail.
        skeleton_needs: Added to ``skeleton`` if points may build on each other.
        needed: Added to ``expansion`` for a point that builds on others; uses ``{points}``, their text.
        conclusion: Request for what follows from all points; uses ``{question}`` and ``{points}``.
        examples: Shown to small models as earlier turns, before the request.
        skeleton_prefill: What the reply to ``skeleton`` is begun with, if the model allows it.
        expansion_prefill: What the reply to ``expansion`` is begun with; uses ``{number}``, ``{point}``.
        skeleton_opening: Added to ``skeleton`` if the reply cannot be begun for the model.
        expansion_opening: Added to ``expansion`` if the reply cannot be begun; may use ``{point}``.
        separator: Stands between a point's heading and its text in the finished answer.

    Raises:
        ValueError: A template misses a field or names an unknown one.
    """

    skeleton: str
    expansion: str
    lengths: Mapping[Detail, str] = field(default_factory=lambda: _ENGLISH["lengths"])
    skeleton_needs: str = _ENGLISH["skeleton_needs"]
    needed: str = _ENGLISH["needed"]
    conclusion: str = _ENGLISH["conclusion"]
    examples: tuple[Example, ...] = ()
    skeleton_prefill: str = "1."
    expansion_prefill: str = "{number}. {point}:"
    skeleton_opening: str = _ENGLISH["skeleton_opening"]
    expansion_opening: str = _ENGLISH["expansion_opening"]
    separator: str = ": "
    expansion_point: str = ""

    def __post_init__(self) -> None:
        for name, required in _FIELDS.items():
            is_expansion = name == "expansion"
            text = vars(self)[name] + (self.expansion_point if is_expansion else "")
            found = {one for _, one, _, _ in Formatter().parse(text) if one}
            if found - (_OPTIONAL if is_expansion else set()) != set(required):
                raise ValueError(
                    f"the {name} template must use exactly the fields {sorted(required)}, got "
                    f"{sorted(found)}; write literal braces as {{{{ and }}}}"
                )
        if missing := set(get_args(Detail)) - set(self.lengths):
            raise ValueError(f"lengths need an entry for {sorted(missing)}, got {sorted(self.lengths)}")

    def expansion_request(
        self, question: str, skeleton: Skeleton, point: Point, *, detail: Detail
    ) -> tuple[str, str]:
        """The message that asks for ``point`` of ``skeleton``, and what a reply that is not begun adds."""
        fields = {"question": question, "skeleton": skeleton.text, "length": self.lengths[detail]}
        fields |= {"number": str(point.number), "point": point.text}
        return self.expansion.format(**fields), self.expansion_point.format(**fields)

    def num_shared(self, question: str, skeleton: Skeleton, *, detail: Detail) -> int:
        """How many characters the expansion requests of all points of ``skeleton`` have in common."""
        fields = {"question": question, "skeleton": skeleton.text, "length": self.lengths[detail]}
        return len(self.expansion.format(**fields, number="\0", point="\0").partition("\0")[0].rstrip(" "))

    def shared(self, question: str) -> str:
        """The lines with which the requests for the skeleton and for every point begin."""
        fields = {"question": question, "length": "", "number": "", "point": "", "skeleton": "\0"}
        both = zip(self.skeleton.format(**fields), self.expansion.format(**fields), strict=False)
        same = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        return same[: same.rfind("\n") + 1]

    def skeleton_examples(self) -> list[Turns]:
        """Requests for the skeletons of ``examples``, and the replies, which are the same begun or not."""
        turns = [(self.skeleton.format(question=one.question), one.skeleton.text) for one in self.examples]
        return [(turn, turn) for turn in turns]

    def expansion_examples(self, detail: Detail) -> list[Turns]:
        """Requests for one point of each of ``examples``, and the replies, begun with it or not."""
        turns = []
        for one in self.examples:
            asked, named = self.expansion_request(one.question, one.skeleton, one.point, detail=detail)
            text, start = one.expansion(detail), self.expansion_reply_start(one.point)
            turns.append(((asked, f"{start} {text}"), (asked + named, text)))
        return turns

    def expansion_reply_start(self, point: Point) -> str:
        """What the reply to :meth:`expansion_request` is begun with."""
        return self.expansion_prefill.format(number=point.number, point=point.text)

    @cached_property
    def example_headings(self) -> frozenset[str]:
        """The headings of ``examples``, with case folded, to notice a model that copies them."""
        return frozenset(heading for example in self.examples for heading in example.skeleton.folded)


def _load(language: str) -> tuple[PromptTemplates, PromptTemplates]:
    """The templates for small and for strong models."""
    wording = load_data(language)
    examples = [Example(skeleton=Skeleton.of(one.pop("headings")), **one) for one in wording["examples"]]
    small = PromptTemplates(**wording["small"], examples=tuple(examples))
    return small, replace(small, **wording["strong"], examples=())


ENGLISH, SHORT_ENGLISH = _load("en")
CHINESE, SHORT_CHINESE = _load("zh")


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


Filter: TypeAlias = Literal["heading", "overrun", "loop"]


@dataclass(frozen=True)
class ReplyBounds:
    """Where a reply ends, besides where the model ends it.

    Attributes:
        stop: Strings before which it ends.
        max_tokens: Its tokens, at most, unless the user has set a bound; ``None`` for no bound.
        min_tokens: Its tokens, at least, for models that take such a bound.
        enough_words: With so many words a point ends at the end of its sentence.
        more_words: So many more for each point that may follow, which is begun later: all end together.
        presence_penalty: For models that take one and whose own is 0: it ends what repeats itself.
    """

    stop: Sequence[str] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    enough_words: int | None = None
    more_words: int = 0
    presence_penalty: float = 0.0


@dataclass(frozen=True)
class ModelProfile:
    """How a kind of model is asked. ``dataclasses.replace(ModelProfile.SMALL, prefill=False)`` changes one.

    Attributes:
        prompts: The requests, and the examples that are shown as earlier chat turns, if there are any.
        prefill: Whether replies are begun for the model. ``None`` leaves it to the provider: if the model is
            known to continue them, or until it has said that it does not.
        outline: Bounds of the outline.
        points: Bounds of a point, by level of detail.
        conclusion: Bounds of the conclusion.
        short_answer: How many words of the plain answer a local model writes beside the points. It begins
            it beside the outline: if it is whole first, it is the answer.
        max_points: How many points an answer has at most; ``None`` for no bound.
        fewest_points: With fewer points in its outline an answer is plain.
        eager: Whether a point is written as soon as its heading is, if the chain does not say.
        heading_words: How many words a heading has, at most; longer ones are sentences and left out.
            ``None`` lets the model write what it likes.
        most_alike: The share of words from which on a heading counts as the repetition of an earlier one.
        filters: What the text of a point passes through: ``"heading"`` drops a repeated heading,
            ``"overrun"`` ends a point where it goes on to another one, and ``"loop"`` ends a text, the plain
            answer's too, that repeats the same eight words three times.
    """

    prompts: Prompts = field(default_factory=Prompts.short)
    prefill: bool | None = None
    outline: ReplyBounds = ReplyBounds()
    points: Mapping[Detail, ReplyBounds] = field(
        default_factory=lambda: dict.fromkeys(get_args(Detail), ReplyBounds())
    )
    conclusion: ReplyBounds = ReplyBounds()
    short_answer: int = 0
    max_points: int | None = None
    fewest_points: int = 2
    eager: bool = False
    heading_words: int | None = None
    most_alike: float = 1.0
    filters: Collection[Filter] = ("heading", "overrun")

    SMALL: ClassVar[ModelProfile]
    """For local models and servers: examples as earlier turns, points that stop at the end of the line."""
    STRONG: ClassVar[ModelProfile]
    """For vendors' models: short requests, no bounds, no guard against loops."""


def _load_small() -> ModelProfile:
    given = load_data("profiles")["small"]
    points = {detail: ReplyBounds(**bounds) for detail, bounds in given.pop("points").items()}
    bounds: dict[str, Any] = {name: ReplyBounds(**given.pop(name)) for name in ("outline", "conclusion")}
    return ModelProfile(Prompts(), points=points, **bounds, **given)


ModelProfile.SMALL, ModelProfile.STRONG = _load_small(), ModelProfile()
PROFILES: Mapping[str, ModelProfile] = {"small": ModelProfile.SMALL, "strong": ModelProfile.STRONG}
UNFILTERED = replace(ModelProfile.STRONG, filters=())
"""For comparisons with the model's own text."""
