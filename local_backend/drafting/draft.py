"""A draft: a tree of tokens guessed to follow a row, and the outcome of verifying it.

Knows token ids and tree shape. Does not know where a draft comes from or how it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree rooted at the last token of a row; most often a chain, or empty.

    Attributes:
        token_ids: The guessed tokens; a parent comes before its children.
        parents: For each token, the node of its parent in ``token_ids``; -1 is the row's last token.
        probabilities: For each token, the probability that its whole path is accepted; empty if the drafter
            gives none.

    Raises:
        ValueError: A parent does not come before its child, or the lengths differ.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.parents)} parents")
        if self.probabilities and len(self.probabilities) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.probabilities)} probabilities")
        if any(not -1 <= parent < child for child, parent in enumerate(self.parents)):
            raise ValueError(f"every parent must stand before its child, got parents {self.parents}")

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> Draft:
        """The draft that guesses exactly ``token_ids``, one after another."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    @classmethod
    def merged(cls, drafts: Iterable[Draft], *, max_tokens: int | None = None) -> Draft:
        """Merge ``drafts``, earlier ones first, into one tree in which common prefixes are stored once.

        If all drafts have probabilities, a shared token gets the highest of its probabilities.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        all_say = True
        node_of: dict[tuple[int, int], int] = {}
        for draft in drafts:
            all_say &= not draft.token_ids or bool(draft.probabilities)
            new_node = {-1: -1}
            for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
                if parent not in new_node:
                    continue
                probability = draft.probabilities[node] if draft.probabilities else 0.0
                key = (new_node[parent], token)
                if key not in node_of:
                    if max_tokens is not None and len(token_ids) >= max_tokens:
                        continue
                    node_of[key] = len(token_ids)
                    token_ids.append(token)
                    parents.append(key[0])
                    probabilities.append(probability)
                new_node[node] = node_of[key]
                probabilities[node_of[key]] = max(probabilities[node_of[key]], probability)
        said = tuple(probabilities) if all_say else ()
        return cls(tuple(token_ids), tuple(parents), said)

    def __len__(self) -> int:
        return len(self.token_ids)

    def expected_below(self, node: int) -> float:
        """Expected number of accepted tokens below ``node`` if it is accepted, by ``probabilities``."""
        below = {node}
        for child in range(node + 1, len(self)):
            if self.parents[child] in below:
                below.add(child)
        return sum(self.probabilities[child] for child in below) / max(self.probabilities[node], 1e-9) - 1

    def nodes_along(self, path: Iterable[int]) -> list[int]:
        """Nodes of the tokens of ``path``, from the root down, as far as the tree contains it."""
        children: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.token_ids, strict=True)):
            children.setdefault(key, node)  # of equal children the first, as in verification
        nodes: list[int] = []
        for token in path:
            child = children.get((nodes[-1] if nodes else -1, token))
            if child is None:
                break
            nodes.append(child)
        return nodes

    @property
    def is_chain(self) -> bool:
        """Whether every token is the child of the one before it."""
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
        depths = self.depths()
        return self._part(lambda node, size: size < max_tokens and depths[node] <= max_depth)

    def likeliest(self, max_tokens: int) -> Draft:
        """The ``max_tokens`` likeliest tokens of the draft, or the first ones if it has no probabilities."""
        if len(self) <= max_tokens:
            return self
        if not self.probabilities:
            return self.truncated(max_tokens=max_tokens, max_depth=len(self))
        kept = set(self.ranked()[:max_tokens])
        return self._part(lambda node, _: node in kept)

    def likeliest_chain(self) -> Draft:
        """The path from the root whose every token is the likeliest of its siblings, or else the first."""
        if self.is_chain:
            return self
        kept: set[int] = set()
        node = -1
        while children := [child for child in range(node + 1, len(self)) if self.parents[child] == node]:
            if self.probabilities:
                children.sort(key=lambda child: -self.probabilities[child])
            node = children[0]
            kept.add(node)
        return self._part(lambda node, _: node in kept)

    def ranked(self) -> list[int]:
        """Nodes of the tokens, likeliest first; empty if the draft has no probabilities."""
        # A child is never likelier than its parent and comes after it, so a stable sort keeps parents first.
        return sorted(range(len(self.probabilities)), key=lambda node: -self.probabilities[node])

    def within_vocabulary(self, size: int) -> Draft:
        """The part of the draft that a model with ``size`` token ids can read.

        A reference may contain other ids if the tokenizer has more tokens than the model.
        """
        if not self.token_ids or (max(self.token_ids) < size and min(self.token_ids) >= 0):
            return self
        return self._part(lambda node, _: 0 <= self.token_ids[node] < size)

    def ending_with(self, end_token_ids: Collection[int]) -> Draft:
        """The part of the draft that could be emitted: nothing after an end token."""
        if not any(token in end_token_ids for token in self.token_ids):
            return self
        goes_on: list[bool] = []
        for token, parent in zip(self.token_ids, self.parents, strict=True):
            goes_on.append(token not in end_token_ids and (parent < 0 or goes_on[parent]))
        return self._part(lambda node, _: self.parents[node] < 0 or goes_on[self.parents[node]])

    def _part(self, is_kept: Callable[[int, int], bool]) -> Draft:
        """Keep nodes for which ``is_kept(node, number kept so far)`` is true and whose parent is kept."""
        new_node: dict[int, int] = {-1: -1}
        token_ids: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if parent in new_node and is_kept(node, len(token_ids)):
                new_node[node] = len(token_ids)
                token_ids.append(token)
                parents.append(new_node[parent])
                if self.probabilities:
                    probabilities.append(self.probabilities[node])
        return replace(
            self, token_ids=tuple(token_ids), parents=tuple(parents), probabilities=tuple(probabilities)
        )


EMPTY_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of verifying one draft.

    Attributes:
        accepted: Nodes of the accepted tokens in the draft, from the root down.
        token_ids: New tokens of the row: the accepted tokens, then the bonus token.
        predictions: The model's own token after the row's last token and after every node of the draft,
            ``1 + len(draft)`` in all, so that a drafter can learn from rejected tokens. With sampling,
            visited nodes hold the chosen token and the others the most likely one.
        draft: What was verified: the drafter's proposal, or a part of it if the row or the budget had no
            room for all. ``accepted`` and ``predictions`` refer to nodes in it.
    """

    accepted: tuple[int, ...]
    token_ids: tuple[int, ...]
    predictions: tuple[int, ...] = field(default=(), repr=False)
    draft: Draft = field(default=EMPTY_DRAFT, repr=False)

    def predictions_along(self, path: Iterable[int]) -> list[int]:
        """The model's own tokens after the root and after every token of ``path`` that was verified."""
        if not self.predictions:
            return []
        nodes = self.draft.nodes_along(path)
        return [self.predictions[0], *(self.predictions[node + 1] for node in nodes)]
