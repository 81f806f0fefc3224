"""A draft: tokens guessed to follow a row, as a tree, with the positions and the mask to verify it.

Knows token ids and tree shape. Does not know where a draft comes from or how it is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree that hangs from the last token of a row; most often a chain, or empty.

    Attributes:
        token_ids: The guessed tokens; a parent stands before its children.
        parents: For each token the place of its parent in ``token_ids``; -1 is the row's last token.

    Raises:
        ValueError: A parent does not stand before its child, or the lengths differ.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.parents)} parents")
        if any(not -1 <= parent < child for child, parent in enumerate(self.parents)):
            raise ValueError(f"every parent must stand before its child, got parents {self.parents}")

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> Draft:
        """The draft that guesses exactly ``token_ids``, one after another."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether every token hangs from the one before it."""
        return all(parent == child - 1 for child, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Distance of each token from the row's last token; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def truncated(self, *, max_tokens: int, max_depth: int) -> Draft:
        """The part of the draft within ``max_tokens`` tokens and ``max_depth`` levels."""
        if len(self) <= max_tokens and (not self.parents or max(self.depths()) <= max_depth):
            return self
        new_place: dict[int, int] = {-1: -1}
        token_ids: list[int] = []
        parents: list[int] = []
        for place, (token, parent, depth) in enumerate(
            zip(self.token_ids, self.parents, self.depths(), strict=True)
        ):
            if len(token_ids) < max_tokens and depth <= max_depth and parent in new_place:
                new_place[place] = len(token_ids)
                token_ids.append(token)
                parents.append(new_place[parent])
        return Draft(tuple(token_ids), tuple(parents))


EMPTY_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification made of one draft.

    Attributes:
        accepted: Places in the draft of the accepted tokens, from the root down.
        token_ids: What the row gains: the accepted tokens, then the bonus token.
        predictions: The model's own token at the row's last token and at every place of the draft:
            ``1 + len(draft)`` of them, so that a drafter can learn from what was refused. Under
            sampling only the visited places are filled; the others hold the most likely token.
        draft: What was verified: the drafter's guess or, where the row or the budget had no room for all
            of it, a part. ``accepted`` and ``predictions`` speak of places in it.
    """

    accepted: tuple[int, ...]
    token_ids: tuple[int, ...]
    predictions: tuple[int, ...] = field(default=(), repr=False)
    draft: Draft = field(default=EMPTY_DRAFT, repr=False)
