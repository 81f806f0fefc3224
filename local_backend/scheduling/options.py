"""How an engine schedules its rows: what a caller may choose.

Knows names and numbers. Does not know rows or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from local_backend.scheduling.admission import DEFAULT_MAX_OVERTAKES, AdmissionPolicy, WaitingRows
from local_backend.scheduling.lengths import LengthPredictor

if TYPE_CHECKING:
    from local_backend.scheduling.length_log import LengthLog


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who begins first, and within how much memory.

    Attributes:
        policy: ``"first_come"``; ``"shortest_first"``, for the least mean latency; ``"longest_first"``, for
            the whole to be done soonest.
        predictor: Says how long answers will be; what it says orders rows and reserves memory. One that
            learns is told of every answer that has ended by itself, and asked again about those who wait.
            ``None`` is :class:`~local_backend.scheduling.observed.ObservedLengths`.
        max_cache_bytes: Memory for keys and values, those of kept beginnings included; what does not fit
            waits. It is taken whole when it is first needed. ``None`` takes what ``max_rows`` rows need.
        max_overtakes: How many that were submitted later may begin before a row that waits.
        length_log: Where prompts and the lengths of their answers are written down, to train a predictor.

    Raises:
        ValueError: The policy is unknown or a number is out of range.
    """

    policy: AdmissionPolicy = "first_come"
    predictor: LengthPredictor | None = None
    max_cache_bytes: int | None = None
    max_overtakes: int = DEFAULT_MAX_OVERTAKES
    length_log: LengthLog | None = None

    def __post_init__(self) -> None:
        WaitingRows[int](self.policy, max_overtakes=self.max_overtakes)  # says what is wrong with them
        if self.max_cache_bytes is not None and self.max_cache_bytes < 1:
            raise ValueError(f"max_cache_bytes must be at least 1, got {self.max_cache_bytes}")

    @classmethod
    def of(cls, scheduling: Scheduling | AdmissionPolicy | None) -> Scheduling:
        """A policy's name, or nothing, as what it stands for.

        Raises:
            TypeError: It is neither.
        """
        if scheduling is None:
            return cls()
        if isinstance(scheduling, str):
            return cls(policy=scheduling)
        if not isinstance(scheduling, Scheduling):
            raise TypeError(
                f"scheduling is a Scheduling or the name of a policy, got {type(scheduling).__name__}"
            )
        return scheduling
