"""Any text is a skeleton; what looks like a list to a reader is read as that list."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sot_chains.outline.skeleton import Point, Skeleton, parse_skeleton


def texts(text: str) -> list[str]:
    return [point.text for point in parse_skeleton(text).points]


@pytest.mark.parametrize(
    "text",
    [
        "1. Sleep\n2. Food\n3. Sport",
        "1) Sleep\n2) Food\n3) Sport",
        "(1) Sleep\n(2) Food\n(3) Sport",
        "（1）Sleep\n（２）Food\n（3）Sport",
        "1、Sleep\n2、Food\n3、Sport",
        "１．Sleep\n２．Food\n３．Sport",
        "1.Sleep\n2.Food\n3.Sport",
        "**1.** Sleep\n**2.** Food\n**3.** Sport",
        "**1. Sleep**\n**2. Food**\n**3. Sport**",
        "1. **Sleep**\n2. **Food:**\n3. **Sport**:",
        "**1**. Sleep\n**2**. Food\n**3**. Sport",
        "### 1. Sleep\n\n### 2. Food\n\n### 3. Sport",
        "1.\nSleep\n2.\nFood\n3.\nSport",
        "1. Sleep\n\n\n2. Food\n\n\n3. Sport",
        "  1. Sleep\n  2. Food\n  3. Sport",
        "1. Sleep\n  2. Food\n  3. Sport",
        "1. Sleep\r\n2. Food\r\n3. Sport\r\n",
        "Here is an outline.\n\n1. Sleep\n2. Food\n3. Sport",
        "1. Sleep\n2. Food\n3. Sport\n\nLet me know\nif you want more!",
        "1. Sleep\n2. Food\n3. Sport\n\n- This is only an outline.",
        "```\n1. Sleep\n2. Food\n3. Sport\n```",
        "1. Sleep\n2. Food\n3. Sport\n---\nThat is all.",
        "1. Sleep\n2. sleep\n3. Food\n4. FOOD\n5. Sport",
        "1. Sleep\n2. Food\n3. Sport\n\n1. Sleep well\n2. Eat well\n3. Move",
        "1. Sure, here it is:\n1. Sleep\n2. Food\n3. Sport",
        "1. Sleep\n\nWhile we sleep we recover.\nMuch.\n\n2. Food\n\nWe are what we eat.\n\n3. Sport",
        "1. Sleep\n2. Food\n4. Sport",
        "1. Sleep\n2. Food\n2. Sport",
        "1. Sleep\n3. Food\n2. Sport",
        "1. Sleep\n10. Food\n100. Sport",
        "1\\. Sleep\n2\\. Food\n3\\. Sport",
        "1\\) Sleep\n2\\) Food\n3\\) Sport",
        "\\(1\\) Sleep\n\\(2\\) Food\n\\(3\\) Sport",
        "- Sleep\n- Food\n- Sport",
        "* Sleep\n* Food\n* Sport",
        "\\* Sleep\n\\* Food\n\\* Sport",
        "• Sleep\n• Food\n• Sport",
        "– **Sleep**\n– **Food**\n– **Sport**",
        "- [ ] Sleep\n- [ ] Food\n- [x] Sport",
        "- Sleep\n - Food\n - Sport",
        "- 1. Sleep\n- 2. Food\n- 4. Sport",
        "1. - Sleep\n2. - Food\n3. - Sport",
        "1. 1. Sleep\n2. 2. Food\n3. 3. Sport",
        "- Outline:\n1. Sleep\n2. Food\n3. Sport",
        "1: Sleep\n2: Food\n3: Sport",
        "[1] Sleep\n[2] Food\n[3] Sport",
        "> 1. Sleep\n> 2. Food\n> 3. Sport",
        "1. __Sleep__\n2. *Food*\n*3.* Sport",
        "- Sleep\n- Food\n- Sport\n\nThat is all.",
    ],
)
def test_lists_in_many_forms(text: str) -> None:
    assert texts(text) == ["Sleep", "Food", "Sport"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "1. Before 2024\n2. The year\n2024. the year it began",
            ["Before 2024", "The year 2024. the year it began"],
        ),
        ("It began in\n2024. The year was warm.", []),
        ("In 2024. the year of change, 1. came first.", []),
        ("1. Costs\n1.5 million was spent\n2. Gains", ["Costs 1.5 million was spent", "Gains"]),
        ("1. Raise it by a factor of 2. Then stop", ["Raise it by a factor of 2. Then stop"]),
        ("1. Sleep\nenough, every\nnight\n2. Food", ["Sleep enough, every night", "Food"]),
        ("1. Sleep\n   - early\n   - long\n2. Food", ["Sleep", "Food"]),
        ("1. Sleep:\n   1. early\n   2. long\n2. Food", ["Sleep", "Food"]),
        ("1. Sleep\n- early\n- long,\n  deep\n2. Food", ["Sleep", "Food"]),
        ("- Sleep\n  - early\n  - long\n- Food", ["Sleep", "Food"]),
        ("* Sleep\n- early\n- long\n* Food", ["Sleep", "Food"]),
        ("1. Sleep\n\n   indented prose\n2. Food", ["Sleep", "Food"]),
        ("1. Sleep\n2.\n3. Food", ["Sleep", "Food"]),
        ("2. Food\n3. Sport", []),
        ("1. Sleep\n3. Sport", ["Sleep", "Sport"]),
        ("1. Sleep\n### deep\n2. Food", ["Sleep deep", "Food"]),
        ("1. See 1:30 - 2:30\n2. Or 2 - 3", ["See 1:30 - 2:30", "Or 2 - 3"]),
        ("1. Sleep\n2. Food\n1. Sport", ["Sleep", "Food"]),
        ("1. 充足的光照：\n2. 适量浇水", ["充足的光照", "适量浇水"]),
        ("1. Light\u20282. Water", ["Light", "Water"]),
        ("", []),
        ("no list at all", []),
        ("1.", []),
        ("1. ---", []),
    ],
)
def test_details(text: str, expected: list[str]) -> None:
    assert texts(text) == expected


def test_points_are_numbered_anew_and_rendered() -> None:
    skeleton = parse_skeleton("1. Sleep\n2. Sleep\n3. Food")
    assert skeleton.points == (Point(1, "Sleep"), Point(2, "Food"))
    assert skeleton.text == "1. Sleep\n2. Food"
    assert len(skeleton) == 2
    assert list(skeleton) == list(skeleton.points)


# Text made of what lists are made of finds more than text made of anything.
list_like = st.lists(
    st.one_of(
        st.sampled_from(
            ["\n", "\n\n", " ", "   ", "**", "*", "#", "- ", ":", "：", ";", "(", ")", "、", "．", "."]
        ),
        st.sampled_from(
            ["1", "2", "3", "１", "２", "1. ", "2. ", "3. ", " 1. ", "2024. ", "a. ", "\t", "\x1c", "\u2028"]
        ),
        st.sampled_from(
            ["\n1. ", "\n2. ", "\n4. ", "\n- ", "\n* ", "\n  - ", "\n• ", "\n1: ", "\n[x] ", "\\", "\n> 2) "]
        ),
        st.text(max_size=3),
    ),
    max_size=40,
).map("".join)


@given(st.one_of(st.text(), list_like))
@example("1. a 2. a 3. a 2. x 3. y")
@example("1. a***b 2. b 3. c**")
@example("1. a 2. b 3. c\n2. A 2. B 3. C")
def test_any_text_is_a_skeleton_and_reading_it_again_changes_nothing(text: str) -> None:
    skeleton = parse_skeleton(text)
    assert isinstance(skeleton, Skeleton)
    assert [point.number for point in skeleton.points] == list(range(1, len(skeleton) + 1))
    assert all(point.text == point.text.strip() != "" and "\n" not in point.text for point in skeleton.points)
    if len(skeleton) >= 2:  # a single heading may itself look like a list on one line
        assert parse_skeleton(skeleton.text) == skeleton


label = st.text(
    st.sampled_from("abcdefghijklmnopqrstuvwxyzäßéабв水光照ABC' -,()"), min_size=1, max_size=30
).map(lambda text: "x" + " ".join(text.split()) + "y")


@given(
    st.lists(label, min_size=1, max_size=12, unique_by=str.casefold),
    st.sampled_from(["{}. ", "{}) ", "({}) ", "{}、"]),
)
def test_a_list_of_clean_labels_is_read_back(labels: list[str], marker: str) -> None:
    assert texts("\n".join(marker.format(n) + text for n, text in enumerate(labels, 1))) == labels


@pytest.mark.parametrize(
    "unit",
    [
        *["1", "１", " ", "\t", "*", "**", "\n", ".", "#", "1.", "1. ", "1.\n", "\n1. a\n2. b", " 2. "],
        *["1. a\n- b\n", "(", "- ", "**1. ", "1\n", "1.1", " \n", "a 2. b 3. ", ";2、", "\u3000", "i"],
        *["- a\n", "1. a\n", "1: ", ">", "[x] "],
    ],
)
def test_much_of_anything_takes_no_longer_than_linear(unit: str) -> None:
    """A check against hanging: the bound is generous, a pattern that backtracks misses it by hours."""
    for text in (unit * (200_000 // len(unit)), "1. " + unit * (200_000 // len(unit))):
        start = time.perf_counter()
        parse_skeleton(text)
        assert time.perf_counter() - start < 60
