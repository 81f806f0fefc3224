"""Finds the sources of a row: positions where its text may continue, each with traits that weight its vote.

Tracks the position in the references that the row last copied from. After a few tokens that the row inserted,
left out or rephrased, copying most likely resumes there; positions shortly after it are likelier than others.
If nothing matches, the starts of references and the commonest tokens are the remaining guesses.

Knows token ids and indexes. Does not know how votes are counted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from local_backend.drafting.copy_tree import Source
from local_backend.drafting.suffix_index import BORDER, GrowingIndex, Match, SuffixIndex

_MAX_REFERENCE_MATCHES, _MAX_OWN_MATCHES, _MAX_BEGINNINGS = 32, 8, 16
# After a detour of at most this many tokens, a row may resume at one of this many next positions.
_MAX_DETOUR_TOKENS, _NUM_RESUMED = 3, 4
# Positions at most this far after the position last copied from are likelier than others.
_CLOSE_TOKENS, _NEAR_TOKENS = 6, 30
# Match length that shows a row is copying from a position: shortly after the last one, or elsewhere.
_ALIGNED_TOKENS, _ALIGNED_ELSEWHERE_TOKENS = 2, 4
# The row's last tokens are compared with those before a position, as sets of this size.
_CONTEXT_TOKENS = 16
_RARE_SHARE = 1 / 20
# Decay per token of a row's deviation counts, and the prior added to them.
_MEMORY = 0.97
_FIRST_DEVIATIONS, _FIRST_TOKENS = 0.6, 6.0

IN_REFERENCE, IN_PROMPT, IN_OWN_TEXT, RESUMED, BEGINNING, COMMON = range(6)
TRAITS = (
    "in a reference",
    "in the prompt, or in other texts",
    "in own text",
    "where the row may resume",
    "beginning of a reference",
    "common token",
    "of a match of one token: logarithm of how often that occurs",
    "close behind the position last copied from",
    "near behind the position last copied from",
    "logarithm of the distance from the beginning of its text",
    "how much of what was written lately stands before it, rare tokens counting more",
    "of a common token: logarithm of its share",
)
"""The traits of a source, in order."""


class CopySources:
    """Finds the positions where one row may continue.

    In the references or, without any, in the prompt; and in ``others``, e.g. earlier answers.
    """

    def __init__(
        self, references: SuffixIndex, prompt: SuffixIndex, others: SuffixIndex | None = None
    ) -> None:
        self._has_references = bool(len(references))
        self._main = references if self._has_references else prompt
        self._beside = [prompt] if self._has_references else []
        self._beside += [others] if others else []
        self._written = GrowingIndex()
        self._next_index = 0  # in the main text, where the last copy would continue; 0: none yet
        self._num_detour_tokens = 0  # emitted since then
        self._num_deviations = self._num_followed = 0.0

    @property
    def deviation(self) -> float:
        """Log odds that the row's next token differs from the position it copies from."""
        rate = (self._num_deviations + _FIRST_DEVIATIONS) / (self._num_followed + _FIRST_TOKENS)
        return math.log(rate / (1 - rate))

    def extend(self, text: Sequence[int], num_prompt_tokens: int) -> None:
        """Record what the row has emitted since the last call: the end of ``text``, its prompt included."""
        if not (num_new := len(text) - num_prompt_tokens - len(self._written.tokens)):
            return
        written = text[len(text) - num_new :]
        self._written.extend(written)
        for token in written:
            self._follow(token)
        # The last token is the bonus; the accepted tokens before it show where the row was copying.
        if self._num_detour_tokens and not self._align(text, 0) and num_new > 1:
            self._align(text[:-1], 1)

    def _follow(self, token: int) -> None:
        goes_on = bool(self._next_index) and self._main.tokens[self._next_index] == token
        if self._next_index and not self._num_detour_tokens:
            self._num_deviations = _MEMORY * self._num_deviations + (not goes_on)
            self._num_followed = _MEMORY * self._num_followed + 1
        if goes_on:
            self._next_index += 1
        self._num_detour_tokens = 0 if goes_on else self._num_detour_tokens + 1

    def _align(self, text: Sequence[int], num_detour_tokens: int) -> bool:
        """Look for the position ``text`` was copied from; returns whether there is one."""
        match = self._main.longest(text, near=self._next_index)
        if match is None:
            return False
        goes_on = self._next_index and 0 <= match.index - self._next_index <= _NEAR_TOKENS
        if match.num_tokens < (_ALIGNED_TOKENS if goes_on else _ALIGNED_ELSEWHERE_TOKENS):
            return False
        self._next_index, self._num_detour_tokens = match.index, num_detour_tokens
        return True

    def __call__(self, text: Sequence[int]) -> list[Source]:
        """List the sources of the token after ``text``, the prompt and all emitted tokens."""
        matches = self._main.matches(text, limit=_MAX_REFERENCE_MATCHES, near=self._next_index)
        rarities = self._rarities(text)
        sources = [self._in_main(IN_REFERENCE, match, rarities) for match in matches]
        for index in self._beside:
            found = index.matches(text, limit=_MAX_OWN_MATCHES)
            sources += [self._elsewhere(IN_PROMPT, index.tokens, match) for match in found]
        own = self._written.matches(limit=_MAX_OWN_MATCHES)
        sources += [self._elsewhere(IN_OWN_TEXT, self._written.tokens, match) for match in own]
        taken = {match.index for match in matches}
        sources += [
            self._in_main(RESUMED, Match(index, 0)) for index in self._resumed() if index not in taken
        ]
        if self._has_references and (not self._written.tokens or not sources):
            starts = self._main.starts[:_MAX_BEGINNINGS]
            sources += [self._in_main(BEGINNING, Match(index, 0)) for index in starts]
        sources += self._common()
        return sources

    def _resumed(self) -> Iterator[int]:
        """Positions where a row may resume copying after a short detour."""
        if not (self._next_index and 0 < self._num_detour_tokens <= _MAX_DETOUR_TOKENS):
            return
        for index in range(self._next_index, self._next_index + _NUM_RESUMED):
            if self._main.tokens[index] == BORDER:
                return
            yield index

    def _common(self) -> Iterator[Source]:
        for count, index in self._main.common_tokens(behind=self._next_index):
            share = math.log(count / len(self._main))
            yield Source(self._main.tokens, index, 0, (*_KINDS[COMMON], 0.0, 0.0, 0.0, 0.0, 0.0, share))

    def _rarities(self, text: Sequence[int]) -> dict[int, float]:
        """The rare tokens among those emitted last, and how rare each is."""
        size, num_own = max(1, len(self._main)), len(self._written.tokens)
        recent = set(text[len(text) - min(num_own, _CONTEXT_TOKENS) :])
        rarities = {token: math.log(_RARE_SHARE * size / (1 + self._main.count(token))) for token in recent}
        return {token: rarity for token, rarity in rarities.items() if rarity > 0}

    def _in_main(self, kind: int, match: Match, rarities: dict[int, float] | None = None) -> Source:
        """A source in the main text: the references or, without any, the prompt."""
        index, tokens = match.index, self._main.tokens
        ahead = index - self._next_index + 1 if self._next_index else 0
        overlap = 0.0
        if rarities:
            before = rarities.keys() & tokens[max(0, index - _CONTEXT_TOKENS - 4) : index - 1].tolist()
            overlap = math.log1p(sum([rarities[token] for token in before]))
        traits = (
            *_KINDS[kind],
            math.log(self._main.count(tokens[index - 1])) if match.num_tokens == 1 else 0.0,
            float(0 < ahead <= _CLOSE_TOKENS),
            float(_CLOSE_TOKENS < ahead <= _NEAR_TOKENS),
            math.log1p(index - self._main.starts[bisect_right(self._main.starts, index) - 1]),
            overlap,
            0.0,
        )
        return Source(tokens, index, match.num_tokens, traits)

    def _elsewhere(self, kind: int, tokens: Sequence[int], match: Match) -> Source:
        """A source in the prompt, if there are references, in other texts, or in the emitted text."""
        count = self._main.count(tokens[match.index - 1]) if match.num_tokens == 1 else 0
        traits = (*_KINDS[kind], math.log(count or 1), 0.0, 0.0, 0.0, 0.0, 0.0)
        return Source(tokens, match.index, match.num_tokens, traits)


_KINDS = tuple(tuple(float(kind == other) for other in range(6)) for kind in range(6))
