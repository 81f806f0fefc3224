"""What a kind of model needs: requests, bounds and filters, as data.

No mechanism asks for a model's size. Which profile suits a model better is measured by
``python -m benchmarks.sot_models``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, get_args

from sot_chains.prompts.templates import Detail, Prompts

Filter: TypeAlias = Literal["heading", "overrun", "loop"]


@dataclass(frozen=True)
class ReplyBounds:
    """Where a reply ends, besides where the model ends it.

    Attributes:
        stop: Strings before which it ends.
        max_tokens: Its tokens, at most, unless the user has set a bound; ``None`` for no bound.
        min_tokens: Its tokens, at least, for models that take such a bound.
        enough_words: With so many words a point ends at the end of its sentence.
        presence_penalty: For models that take one and whose own is 0: it ends what repeats itself.
    """

    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    enough_words: int | None = None
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
        short_answer: How many tokens of the plain answer a local model writes beside the points. It begins
            it beside the outline: if it is whole first, it is the answer.
        max_points: How many points an answer has at most; ``None`` for no bound.
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
    heading_words: int | None = None
    most_alike: float = 1.0
    filters: frozenset[Filter] = frozenset({"heading", "overrun"})

    SMALL: ClassVar[ModelProfile]
    """For local models and servers: examples as earlier turns, points that stop at the end of the line."""
    STRONG: ClassVar[ModelProfile]
    """For vendors' models: short requests, no bounds, no guard against loops."""


# A small model goes on with the points after its own, so that a point ends with its line; it may repeat
# itself, so that its tokens are bounded. The longest point decides how long an answer takes. With these
# bounds an answer by points is about as long as a plain one.
ModelProfile.SMALL = ModelProfile(
    prompts=Prompts(),
    outline=ReplyBounds(stop=("\n\n",), max_tokens=110, presence_penalty=1.0),
    points={
        "brief": ReplyBounds(stop=("\n",), max_tokens=60, presence_penalty=1.0),
        "normal": ReplyBounds(("\n",), 60, min_tokens=20, enough_words=22, presence_penalty=1.0),
        "full": ReplyBounds(max_tokens=400, presence_penalty=1.0),
    },
    conclusion=ReplyBounds(stop=("\n",), max_tokens=110, min_tokens=20, presence_penalty=1.0),
    short_answer=40,
    max_points=5,
    heading_words=8,
    most_alike=0.7,
    filters=frozenset({"heading", "overrun", "loop"}),
)
ModelProfile.STRONG = ModelProfile()
PROFILES: Mapping[str, ModelProfile] = {"small": ModelProfile.SMALL, "strong": ModelProfile.STRONG}
UNFILTERED = replace(ModelProfile.STRONG, filters=frozenset())
"""For comparisons with the model's own text."""
