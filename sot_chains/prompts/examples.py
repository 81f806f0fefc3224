"""Few-shot examples for small models, shown as earlier chat turns. Knows text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sot_chains.outline.skeleton import Point, Skeleton
from sot_chains.outline.words import SENTENCE_END

Detail: TypeAlias = Literal["brief", "normal", "full"]


@dataclass(frozen=True)
class Example:
    """A question with the skeleton of its answer and the expansion of one point.

    Shown to small models as earlier chat turns, since they copy examples that are part of the request.

    Attributes:
        question: The question.
        skeleton: The skeleton of its answer.
        number: The number of the expanded point.
        text: The expansion.
    """

    question: str
    skeleton: Skeleton
    number: int
    text: str

    @property
    def point(self) -> Point:
        """The expanded point."""
        return self.skeleton.points[self.number - 1]

    def expansion(self, detail: Detail) -> str:
        """The expansion in a level of detail."""
        end = SENTENCE_END.search(self.text) if detail == "brief" else None
        return self.text[: end.end()] if end else self.text


def _outline(headings: str) -> Skeleton:
    return Skeleton.of(headings.split(" / "))


ENGLISH_EXAMPLES = (
    Example(
        "How do I keep a houseplant alive?",
        _outline(
            "Enough daylight / Careful watering / Fresh soil each spring / Signs of pests / The right pot / "
            "Food while it grows / Clean leaves"
        ),
        2,
        "Water a houseplant only when its upper soil feels dry, because roots that stand in water rot. Push "
        "a finger into the pot: if soil sticks to it, wait another day or two. In winter most houseplants "
        "need less, since they hardly grow then, while a sunny week in summer may ask for water every other "
        "day. Pour slowly until some water runs out below, and empty the saucer afterwards.",
    ),
    Example(
        "What made the railway so important?",
        _outline(
            "Cheaper transport of goods / Faster travel / New towns and markets / A shared clock / "
            "Jobs in industry / Fresh food in cities"
        ),
        4,
        "Railway timetables only work when every station keeps the same time, so local noon gave way to one "
        "national time. Before the railway, each town set its clocks by the sun, and neighbouring towns "
        "could be minutes apart. Companies sent the time along their telegraph wires, and one town after the "
        "other followed. Today's time zones go back to the railways that needed them.",
    ),
)

CHINESE_EXAMPLES = (
    Example(
        "怎样养好室内植物？",
        _outline("充足的光照 / 适量浇水 / 每年春天换土 / 留意虫害 / 合适的花盆 / 生长期施肥 / 清洁叶片"),
        2,
        "室内植物要等表层土壤干了再浇水，因为根泡在水里会腐烂。可以把手指插进土里试一试：如果土粘手，就再等一两"
        "天。冬天大多数室内植物几乎不生长，需要的水更少，而夏天晴朗的一周里可能隔天就要浇一次。浇水要慢，直到有水"
        "从盆底流出，浇完把托盘里的水倒掉。",
    ),
    Example(
        "铁路为什么这么重要？",
        _outline("货运更便宜 / 出行更快 / 新的城镇和市场 / 统一的时间 / 工业岗位 / 城市的新鲜食物"),
        4,
        "铁路的时刻表只有在每个车站使用同一时间时才有意义，所以各地的时间让位给了全国统一的时间。在那之前，每个"
        "城镇按太阳校准钟表，相邻的城镇可能相差几分钟。铁路公司通过电报线路传送时间，城镇一个接一个地跟随。今天的"
        "时区就来自铁路的需要。",
    ),
)
