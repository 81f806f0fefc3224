"""Which topic an example is about: topics are dealt as cards are, each once before any comes again.

Drawn by chance, the topic drawn most often was drawn five times as often as another, and what is seldom
taught is not learned. Knows topics and counts. Does not know what is asked about them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from local_backend.embedded.corpus import Topic


class Decks:
    """A deck of the topics for each kind of example, shuffled anew whenever it has been dealt.

    Args:
        topics: What the decks hold.
        seed: Of the shuffles.
    """

    def __init__(self, topics: Sequence[Topic], seed: str) -> None:
        self.topics = tuple(topics)
        self._seed = seed
        self._num_dealt: dict[str, int] = {}

    def top(self, kind: str) -> Topic:
        """The topic that lies on top of the deck of ``kind``; it stays there until it is taken."""
        round_number, place = divmod(self._num_dealt.get(kind, 0), len(self.topics))
        order = list(range(len(self.topics)))
        random.Random(f"{self._seed}:{kind}:{round_number}").shuffle(order)
        return self.topics[order[place]]

    def take(self, kind: str) -> None:
        """Take the topic on top: the next one is another."""
        self._num_dealt[kind] = self._num_dealt.get(kind, 0) + 1

    def state(self) -> dict[str, int]:
        """How many were taken of each deck, which is all a checkpoint keeps."""
        return dict(self._num_dealt)

    def load(self, state: Mapping[str, int]) -> None:
        """Go on from a checkpoint's."""
        self._num_dealt = dict(state)


__all__ = ["Decks"]
