"""Marks of what a point builds on, in the form that the prompts ask for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.outline.skeleton import Point, Skeleton, parse_needs, read_mark


def with_needs(skeleton: Skeleton) -> Skeleton:
    """The skeleton with the marks of its headings read and removed."""
    points: list[Point] = []
    for point in skeleton:
        points.append(read_mark(point, points))
    return Skeleton(tuple(points))


@pytest.mark.parametrize(
    ("heading", "text", "needs"),
    [
        ("Total cost (needs 2, 3)", "Total cost", (2, 3)),
        ("Total cost (Needs 1, 2, and 3).", "Total cost", (1, 2, 3)),
        ("Total cost(needs points 2 and 1)", "Total cost", (1, 2)),
        ("Total cost (needs: 1)", "Total cost", (1,)),
        ("Total cost (needs 4, 5, 3)", "Total cost", (3,)),  # not itself and no later point
        ("Total cost (needs none)", "Total cost", ()),
        ("总费用（需要 2、3）", "总费用", (2, 3)),
        ("总费用（需要2和3）。", "总费用", (2, 3)),
    ],
)
def test_marks_are_read(heading: str, text: str, needs: tuple[int, ...]) -> None:
    assert parse_needs(heading, 4) == (text, needs)


@pytest.mark.parametrize(
    "heading",
    [
        "A recipe (needs 2 eggs)",
        "Why a bike needs 2 wheels",
        "Growth (1939, 1945)",
        "(needs 1)",
        "What it needs: nothing",
        "Total (needs 1.5)",
        "两个人（需要两人）",
    ],
)
def test_what_is_no_mark_stays(heading: str) -> None:
    assert parse_needs(heading, 4) == (heading, ())


def test_headings_that_differ_in_their_marks_alone_stay_different() -> None:
    points = with_needs(Skeleton.of(["Cost", "Dates", "Cost (needs 1)", "Cost (needs 2)"])).points
    assert [point.text for point in points] == ["Cost", "Dates", "Cost (needs 1)", "Cost (needs 2)"]
    assert [point.needs for point in points] == [(), (), (1,), (2,)]


PIECES = st.sampled_from(["(", ")", "（", "1", "2", "30", " ", ", ", "、", "and", "needs", "需要", "Cost"])


@given(st.lists(st.one_of(st.text(max_size=30), st.lists(PIECES, max_size=9).map("".join)), max_size=12))
def test_any_text_has_a_graph_without_a_cycle(headings: list[str]) -> None:
    skeleton = with_needs(Skeleton.of(headings))
    assert [point.number for point in skeleton] == list(range(1, len(headings) + 1))
    for point in skeleton:
        assert all(1 <= need < point.number for need in point.needs)
        assert list(point.needs) == sorted(set(point.needs))


@pytest.mark.parametrize("piece", ["(needs ", "needs 1, ", " ", "(", "(needs 1 and ", "(needs 1)"])
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    # The suite's limit of time would not allow more.
    assert parse_needs(f"{piece * 20_000} Total (needs 1, 2)", 9)[1] == (1, 2)
