"""Few-shot examples for small models, shown as earlier chat turns. Knows text."""

from __future__ import annotations

from dataclasses import dataclass

from sot_chains.text.skeleton import Point, Skeleton


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


ENGLISH_EXAMPLES = (
    Example(
        "How do I keep a houseplant alive?",
        Skeleton.of(
            (
                "Enough daylight",
                "Careful watering",
                "Fresh soil each spring",
                "Signs of pests",
                "The right pot",
            )
        ),
        2,
        "Water only when the upper soil feels dry, because roots that stand in water rot. "
        "In winter most plants need less.",
    ),
    Example(
        "What made the railway so important?",
        Skeleton.of(
            (
                "Cheaper transport of goods",
                "Faster travel",
                "New towns and markets",
                "A shared clock",
                "Jobs in industry",
            )
        ),
        4,
        "Timetables only work when every station keeps the same time, so local noon gave way to one "
        "national time.",
    ),
)

CHINESE_EXAMPLES = (
    Example(
        "怎样养好室内植物？",
        Skeleton.of(("充足的光照", "适量浇水", "每年春天换土", "留意虫害")),
        2,
        "等表层土壤干了再浇水，因为根泡在水里会腐烂。冬天大多数植物需要的水更少。",
    ),
    Example(
        "铁路为什么这么重要？",
        Skeleton.of(("货运更便宜", "出行更快", "新的城镇和市场", "统一的时间", "工业岗位")),
        4,
        "只有每个车站使用同一时间，时刻表才有意义，所以各地的时间让位给了全国统一的时间。",
    ),
)
