"""The picture of the ablation."""

from __future__ import annotations

import pytest

from benchmarks.copy_ablation import draw


def test_the_ablation_draws_a_line_for_each_match_and_one_beside_them() -> None:
    results = {
        "n": [1, 2],
        "k": [5, 10],
        "tokens_per_forward": [[2.0, 3.0], [1.0, 2.0]],
        "adaptive": {"tokens_per_forward": 4.0},
    }
    lines = draw(results).axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[2.0, 3.0], [1.0, 2.0], [4.0, 4.0]]
    with pytest.raises(ValueError, match="no 'seconds'"):
        draw(results, figure="seconds")
