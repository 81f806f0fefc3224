"""What a draft says of itself."""

from __future__ import annotations

import pytest

from local_backend.drafting.draft import Draft


def test_what_is_expected_below_a_token_is_counted_where_it_was_accepted() -> None:
    # 1 -> 2 -> 3, and 4 beside 2; what hangs elsewhere does not count.
    draft = Draft((1, 2, 3, 4, 5), (-1, 0, 1, 0, -1), probabilities=(0.5, 0.25, 0.125, 0.1, 0.4))
    assert draft.expected_below(0) == pytest.approx((0.25 + 0.125 + 0.1) / 0.5)
    assert draft.expected_below(1) == pytest.approx(0.5)
    assert draft.expected_below(2) == draft.expected_below(4) == 0.0
