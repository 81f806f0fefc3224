"""Where a row's text may go on: every place worth a vote, with what speaks for it.

Of each row it is known where in the references it has last been copying from. That place is the best guess
where to go on after a few words of the row's own, be they put in, left out or said differently; and the
places shortly behind it are likelier than others. Where nothing matches, the beginnings of references and
the commonest tokens are left to guess.

Knows token ids and indexes. Does not know how votes are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from local_backend.drafting.copy_tree import Source
from local_backend.drafting.suffix_index import BORDER, GrowingIndex, Match, SuffixIndex

_MAX_REFERENCE_MATCHES, _MAX_OWN_MATCHES, _MAX_BEGINNINGS = 32, 8, 16
# After at most so many tokens of its own a row may go on where it was, or up to so many tokens further.
_MAX_DETOUR_TOKENS, _NUM_RESUMED_PLACES = 3, 4
# What is so close behind the place last copied from is likelier than what is elsewhere.
_CLOSE_TOKENS, _NEAR_TOKENS = 6, 30
# So long a match says that a row now copies from there: behind where it was, or elsewhere.
_ALIGNED_TOKENS, _ALIGNED_ELSEWHERE_TOKENS = 2, 4
# What was written lately, and what stands before a place, are compared as sets of so many tokens.
_CONTEXT_TOKENS = 16
_RARE_SHARE = 1 / 20
# How fast what is known of a row's ways is forgotten, and what is taken for known at first.
_MEMORY = 0.97
_FIRST_DEVIATIONS, _FIRST_TOKENS = 0.6, 6.0

IN_REFERENCE, IN_PROMPT, IN_OWN_TEXT, RESUMED, BEGINNING, COMMON = range(6)
TRAITS = (
    "in a reference",
    "in the prompt",
    "in own text",
    "where the row may resume",
    "beginning of a reference",
    "common token",
    "of a match of one token: logarithm of how often that occurs",
    "close behind the place last copied from",
    "near behind the place last copied from",
    "logarithm of the distance from the beginning of its text",
    "how much of what was written lately stands before it, rare tokens counting more",
    "of a common token: logarithm of its share",
)
"""The traits of a source, in order."""


class CopySources:
    """The places one row may go on at.

    Args:
        references: Index of what may be copied; if it is empty, the prompt is.
        prompt: Index of the row's prompt.
    """

    def __init__(self, references: SuffixIndex, prompt: SuffixIndex) -> None:
        self._prompt = prompt
        self._has_references = bool(len(references))
        self._main = references if self._has_references else prompt
        self._written = GrowingIndex()
        self._next_place = 0  # in the main text, where the last copy would go on; 0: nowhere yet
        self._num_detour_tokens = 0  # written since then
        self._num_deviations = self._num_followed = 0.0

    @property
    def num_written(self) -> int:
        """How many of the row's own tokens are known here."""
        return len(self._written.tokens)

    @property
    def deviation(self) -> float:
        """How often the row does not go on as the place it copies from, as log odds."""
        rate = (self._num_deviations + _FIRST_DEVIATIONS) / (self._num_followed + _FIRST_TOKENS)
        return math.log(rate / (1 - rate))

    def extend(self, text: Sequence[int], num_new: int) -> None:
        """The row has written the last ``num_new`` tokens of ``text``."""
        if not num_new:
            return
        written = text[len(text) - num_new :]
        self._written.extend(written)
        for token in written:
            self._follow(token)
        # The last token is the model's own; what was accepted before it tells where the row was.
        if self._num_detour_tokens and not self._align(text, 0) and num_new > 1:
            self._align(text[:-1], 1)

    def _follow(self, token: int) -> None:
        goes_on = bool(self._next_place) and self._main.tokens[self._next_place] == token
        if self._next_place and not self._num_detour_tokens:
            self._num_deviations = _MEMORY * self._num_deviations + (not goes_on)
            self._num_followed = _MEMORY * self._num_followed + 1
        if goes_on:
            self._next_place += 1
        self._num_detour_tokens = 0 if goes_on else self._num_detour_tokens + 1

    def _align(self, text: Sequence[int], num_detour_tokens: int) -> bool:
        """Look for the place ``text`` was copied from; returns whether there is one."""
        match = self._main.longest(text, near=self._next_place)
        if match is None:
            return False
        goes_on = self._next_place and 0 <= match.place - self._next_place <= _NEAR_TOKENS
        if match.num_tokens < (_ALIGNED_TOKENS if goes_on else _ALIGNED_ELSEWHERE_TOKENS):
            return False
        self._next_place, self._num_detour_tokens = match.place, num_detour_tokens
        return True

    def __call__(self, text: Sequence[int]) -> list[Source]:
        """Every place worth a vote.

        Args:
            text: Prompt and everything written.
        """
        matches = self._main.matches(text, limit=_MAX_REFERENCE_MATCHES, near=self._next_place)
        rarities = self._rarities(text)
        sources = [self._in_main(IN_REFERENCE, match, rarities) for match in matches]
        if self._has_references:
            own = self._prompt.matches(text, limit=_MAX_OWN_MATCHES)
            sources += [self._elsewhere(IN_PROMPT, self._prompt.tokens, match) for match in own]
        own = self._written.matches(limit=_MAX_OWN_MATCHES)
        sources += [self._elsewhere(IN_OWN_TEXT, self._written.tokens, match) for match in own]
        taken = {match.place for match in matches}
        sources += [
            self._in_main(RESUMED, Match(place, 0)) for place in self._resumed() if place not in taken
        ]
        if self._has_references and (not self._written.tokens or not sources):
            starts = self._main.starts[:_MAX_BEGINNINGS]
            sources += [self._in_main(BEGINNING, Match(place, 0)) for place in starts]
        sources += self._common()
        return sources

    def _resumed(self) -> Iterator[int]:
        """Where a row that has gone its own way for a few tokens may come back."""
        if not (self._next_place and 0 < self._num_detour_tokens <= _MAX_DETOUR_TOKENS):
            return
        for place in range(self._next_place, self._next_place + _NUM_RESUMED_PLACES):
            if self._main.tokens[place] == BORDER:
                return
            yield place

    def _common(self) -> Iterator[Source]:
        for count, place in self._main.common_tokens(behind=self._next_place):
            share = math.log(count / len(self._main))
            yield Source(
                self._main.tokens, place, 0, (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, share)
            )

    def _rarities(self, text: Sequence[int]) -> dict[int, float]:
        """The tokens written lately, and how rare each is."""
        size, num_own = max(1, len(self._main)), len(self._written.tokens)
        recent = set(text[len(text) - min(num_own, _CONTEXT_TOKENS) :])
        rarities = {token: math.log(_RARE_SHARE * size / (1 + self._main.count(token))) for token in recent}
        return {token: rarity for token, rarity in rarities.items() if rarity > 0}

    def _in_main(self, kind: int, match: Match, rarities: dict[int, float] | None = None) -> Source:
        """A place in the text that is copied from."""
        place, tokens = match.place, self._main.tokens
        ahead = place - self._next_place + 1 if self._next_place else 0
        overlap = 0.0
        if rarities:
            before = rarities.keys() & tokens[max(0, place - _CONTEXT_TOKENS - 4) : place - 1].tolist()
            overlap = math.log1p(sum([rarities[token] for token in before]))
        traits = (
            *_KINDS[kind],
            math.log(self._main.count(tokens[place - 1])) if match.num_tokens == 1 else 0.0,
            float(0 < ahead <= _CLOSE_TOKENS),
            float(_CLOSE_TOKENS < ahead <= _NEAR_TOKENS),
            math.log1p(place - self._main.starts[self._main.text_at(place)]),
            overlap,
            0.0,
        )
        return Source(tokens, place, match.num_tokens, traits)

    def _elsewhere(self, kind: int, tokens: Sequence[int], match: Match) -> Source:
        """A place in the prompt beside the references, or in what the row has written."""
        count = self._main.count(tokens[match.place - 1]) if match.num_tokens == 1 else 0
        return Source(
            tokens,
            match.place,
            match.num_tokens,
            (*_KINDS[kind], math.log(count or 1), 0.0, 0.0, 0.0, 0.0, 0.0),
        )


_KINDS = tuple(tuple(float(kind == other) for other in range(6)) for kind in range(6))
