"""The beginning that is found is the one that shares most; memory is kept to."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from local_backend.caching.prefix_cache import PrefixCache, num_shared

# Few different tokens, so that beginnings are shared.
_TEXTS = st.lists(st.integers(0, 2), max_size=12)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Token by token."""
    count = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            break
        count += 1
    return count


@given(_TEXTS, _TEXTS)
def test_shared_tokens_are_those_counted_one_by_one(one: list[int], other: list[int]) -> None:
    assert num_shared(one, other) == _shared(one, other)


@given(st.lists(_TEXTS, max_size=20), _TEXTS)
@settings(deadline=None)
def test_no_other_shares_more_than_what_is_found(texts: list[list[int]], wanted: list[int]) -> None:
    kept = PrefixCache(max_bytes=10_000)
    for text in texts:
        kept.keep(text, 1, list)
    most = max((_shared(text, wanted) for text in texts), default=0)
    prefix, count = kept.find(wanted)
    assert count == most
    assert (prefix is None) == (most == 0)
    if prefix is not None:
        assert _shared(prefix.token_ids, wanted) == most


@given(st.lists(_TEXTS, max_size=40), st.integers(0, 60))
@settings(deadline=None)
def test_memory_is_kept_to(texts: list[list[int]], max_bytes: int) -> None:
    kept = PrefixCache(max_bytes)
    for text in texts:
        kept.keep(text, 3, list)
        assert kept.num_bytes == 3 * sum(len(prefix.token_ids) for prefix in kept.kept.values()) <= max_bytes
