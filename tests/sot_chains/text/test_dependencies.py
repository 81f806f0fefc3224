"""Marks of what a point builds on, in the forms in which models write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.text.dependencies import needs_of, with_needs
from sot_chains.text.skeleton import Skeleton


@pytest.mark.parametrize(
    ("heading", "text", "needs"),
    [
        ("Total cost (needs 2, 3)", "Total cost", (2, 3)),
        ("Total cost (depends on points 1 and 2)", "Total cost", (1, 2)),
        ("Total cost [uses 1-3]", "Total cost", (1, 2, 3)),
        ("Total cost (builds on 1 through 3).", "Total cost", (1, 2, 3)),
        ("Total cost (based on 1, 2, and 3)", "Total cost", (1, 2, 3)),
        ("Total cost - requires steps 1, 2", "Total cost", (1, 2)),
        ("Total cost, depends on 2", "Total cost", (2,)),
        ("Total cost: needs 2", "Total cost", (2,)),
        ("Total cost (needs: 1)", "Total cost", (1,)),
        ("Total cost **(Needs #1 & #2)**", "Total cost", (1, 2)),
        ("Total cost (after 1; 2)", "Total cost", (1, 2)),
        ("总费用（需要 2、3）", "总费用", (2, 3)),
        ("总费用（依赖第1点和第2点）", "总费用", (1, 2)),
        ("Total cost (needs 4, 5, 9)", "Total cost", ()),  # itself, a later one, one that is missing
        ("Total cost (needs 3, 7)", "Total cost", (3,)),
        ("Growth (from 1939 to 1945)", "Growth (from 1939 to 1945)", ()),
        ("Growth (from 5 to 9)", "Growth (from 5 to 9)", ()),
        ("What the team needs", "What the team needs", ()),
        ("(needs 1)", "(needs 1)", ()),
        ("Plan with 3 people", "Plan with 3 people", ()),
    ],
)
def test_marks_are_read(heading: str, text: str, needs: tuple[int, ...]) -> None:
    assert needs_of(heading, 4) == (text, needs)


PIECES = st.sampled_from(
    [
        "needs",
        "(",
        ")",
        " ",
        "1",
        "2",
        "30",
        ", ",
        "and",
        "depends on",
        "-",
        "需要",
        "、",
        "uses",
        "Cost",
        "[",
        "]",
        "第",
    ]
)


@given(st.lists(st.one_of(st.text(max_size=30), st.lists(PIECES, max_size=9).map("".join)), max_size=12))
def test_any_text_has_a_graph_without_a_cycle(headings: list[str]) -> None:
    skeleton = with_needs(Skeleton.of(headings))
    assert [point.number for point in skeleton] == list(range(1, len(headings) + 1))
    for point in skeleton:
        assert all(1 <= need < point.number for need in point.needs)
        assert list(point.needs) == sorted(set(point.needs))


@pytest.mark.parametrize("piece", ["(needs ", "needs 1, ", " ", "1-", "([", "(uses 1 and "])
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    # Of any text the end alone is searched: what stands further in front changes nothing.
    end = f"{piece * 20} Total (needs 1, 2)"
    assert needs_of(piece * 100_000 + end, 9)[1] == needs_of("x" * 600_000 + end, 9)[1] == (1, 2)
