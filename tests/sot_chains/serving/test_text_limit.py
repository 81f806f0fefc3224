"""Where a text ends, whatever pieces it comes in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sot_chains.serving.answer import TextLimit

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


@given(st.lists(TEXT, max_size=8), STOPS)
def test_it_ends_before_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    limit = TextLimit(stop)
    shown = "".join(map(limit.feed, pieces)) + limit.end()
    whole = "".join(pieces)
    assert whole.startswith(shown)
    assert not any(one in shown for one in stop)
    # It ends where a stop string begins, or not at all.
    rest = whole[len(shown) :]
    assert any(rest.startswith(one) for one in stop) if any(one in whole for one in stop) else not rest


@given(st.lists(TEXT, max_size=8), st.integers(1, 40))
def test_it_has_at_most_so_many_tokens(pieces: list[str], max_tokens: int) -> None:
    limit = TextLimit(max_tokens=max_tokens, count=len)
    shown = "".join(map(limit.feed, pieces)) + limit.end()
    assert shown == "".join(pieces)[:max_tokens]
    assert limit.is_out_of_tokens == (len("".join(pieces)) > max_tokens)
