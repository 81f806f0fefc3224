"""Reading an outline while it is written: what was read stays, however the text is split and continues."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sot_chains.outline.list_parser import OutlineParser
from sot_chains.outline.reader import OutlineReader
from sot_chains.outline.skeleton import Point, Skeleton, parse_skeleton
from sot_chains.prompts.profile import ENGLISH
from tests.sot_chains.outline.test_skeleton import list_like

texts = st.one_of(st.text(), st.text("12.) ab\n-*", max_size=80), list_like)
words_bounds = st.sampled_from([None, 8])
cuts = st.lists(st.integers(1, 7), max_size=40)


def pieces(text: str, lengths: list[int]) -> list[str]:
    """``text`` in pieces of the given lengths, the rest in one."""
    cut, start = [], 0
    for length in lengths:
        cut.append(text[start : start + length])
        start += length
    return [*cut, text[start:]]


def read(
    text: str, lengths: list[int], start: str | None, most: int | None, words: int | None = None
) -> list[Point]:
    """The points that a reader gives out, each of which must stay, if they make an outline."""
    reader = OutlineReader(most, words)
    reader.reply_start = start
    given: list[Point] = []
    for piece in pieces(text, lengths):
        reader.feed(piece)
        given += reader.take()
        assert reader.text == text[: len(reader.text)]
    reader.end()
    given += reader.take()
    return [] if reader.find_fault() else given


@given(texts, cuts)
@example("1. a 2. b 3. c\n2. A 2. B 3. C", [3] * 12)
@example("1. Costs\n2.5 million\n2. Gains", [1] * 30)
@example("1. a\r\n2. b\r\n\r\nc", [1] * 16)
def test_what_is_parsed_of_a_beginning_is_parsed_of_the_whole(text: str, lengths: list[int]) -> None:
    whole = [point.text for point in parse_skeleton(text)]
    parser = OutlineParser()
    for piece in pieces(text, lengths):
        parser.feed(piece)
        assert parser.headings == whole[: len(parser.headings)]
    parser.end()
    assert parser.headings == whole


@given(texts, cuts, st.sampled_from([None, "1.", "1. "]), st.sampled_from([None, 2, 3]), words_bounds)
@example("1. Sleep well\n2. Sleep\nwell", [1] * 30, None, None, None)
@example("Sure:\n  1. Sleep\n  2. Food", [1] * 30, "1.", None, 8)
def test_points_given_out_do_not_depend_on_how_the_text_is_cut(
    text: str, lengths: list[int], start: str | None, most: int | None, words: int | None
) -> None:
    in_pieces = read(text, lengths, start, most, words)
    at_once = read(text, [], start, most, words)
    assert in_pieces == at_once
    assert len(in_pieces) != 1
    assert [point.number for point in in_pieces] == list(range(1, len(in_pieces) + 1))
    if start is None:
        whole = parse_skeleton(text).points[:most]
        assert in_pieces == (list(whole) if len(whole) >= 2 else [])


def test_a_point_is_given_out_once_the_next_one_begins() -> None:
    reader = OutlineReader()
    begun = []
    for character in "1. Sleep\n2. Food\n3. Sport\n":
        reader.feed(character)
        begun += [(reader.text[-4:], point.text) for point in reader.take()]
    assert begun == [("2. F", "Sleep"), ("3. S", "Food")]
    reader.end()
    assert reader.take() == [Point(3, "Sport")]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (" Sleep\n2. Food", ["Sleep", "Food"]),  # goes on from "1."
        ("1. Sleep\n2. Food", ["Sleep", "Food"]),  # starts again
        ("Sure!\n1. Sleep\n2. Food", ["Sleep", "Food"]),
        ("Sleep\n2. Food\n\n1. A\n2. B\n3. C", ["Sleep", "Food"]),
        (" Sleep", []),
        ("1. Sleep\n2. sleep", []),
        ("", []),
        (" Sleep\n3. Food", ["Sleep", "Food"]),
        (" Sleep\n- early\n- long\n2. Food\n- fresh", ["Sleep", "Food"]),
        ("\n\n- Sleep\n- Food", ["Sleep", "Food"]),  # of another kind
    ],
)
def test_a_reply_that_was_begun(reply: str, expected: list[str]) -> None:
    assert [point.text for point in read(reply, [2] * 30, "1.", None)] == expected


@given(texts, texts, cuts)
def test_another_attempt_adds_to_what_was_given_out(first: str, second: str, lengths: list[int]) -> None:
    reader = OutlineReader(5)
    reader.feed(first)
    given = reader.take()
    reader.restart()
    assert reader.text == ""
    for piece in pieces(second, lengths):
        reader.feed(piece)
        given += reader.take()
    reader.end()
    given += reader.take()
    assert reader.text == second
    assert [point.number for point in given] == list(range(1, len(given) + 1))
    assert len({point.text.casefold() for point in given}) == len(given) <= 5


STYLES = {
    **{
        style: [style.format(number) for number in range(13)]
        for style in ("{}. ", "{}) ", "({}) ", "{}\\. ", "**{}.** ", "### {}. ", "{}: ", "{}、")
    },
    **{bullet: [f"{bullet} "] * 13 for bullet in ("-", "*", "•", "+", "\\-")},
}
word = st.text("abcdefghimnopqrstuvxyzäéß", min_size=3, max_size=8)
heading = st.lists(word, min_size=1, max_size=4).map(lambda words: " ".join(words).capitalize())


@given(
    st.lists(heading, min_size=2, max_size=5, unique_by=str.casefold),
    st.sampled_from(sorted(STYLES)),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.sampled_from(["\n", "\n\n", "\r\n", "\n \n"]),
    st.sampled_from(["", "Sure! Here it is:\n\n", "**Outline**\n"]),
)
def test_an_outline_in_any_style_cut_at_every_byte(
    headings: list[str], style: str, steps: list[int], line_break: str, introduction: str
) -> None:
    numbers = [1]
    for step in steps:
        numbers.append(numbers[-1] + max(step, len(numbers) == 1))  # another 1 would start the list again
    lines = [STYLES[style][number] + text for number, text in zip(numbers, headings, strict=False)]
    whole = introduction + line_break.join(lines)
    assert [point.text for point in read(whole, [], None, None)] == headings
    content = whole.encode()
    for end in range(len(content)):
        text = content[:end].decode(errors="ignore")
        cut = OutlineReader()
        cut.feed(text)
        cut.end(is_cut=True)
        assert cut.headings == headings[: len(cut.headings)]
        parsed = [point.text for point in parse_skeleton(text)]
        assert parsed[:-1] == headings[: len(parsed[:-1])]  # the last may not be whole
    reader, given = OutlineReader(), list[Point]()
    for character in whole:
        reader.feed(character)
        given += reader.take()
        assert given == list(Skeleton.of(headings[: len(given)]))


@pytest.mark.parametrize(
    ("headings", "fault"),
    [
        ([], "no usable points"),
        (["Sleep"], "1 usable point"),
        (["Enough daylight", "Careful watering", "Fresh soil each spring", "Sleep"], "copies the headings"),
        (["word " * 26, "other " * 30, "Sleep"], "whole paragraphs"),
        (["Enough daylight", "Sleep", "Food"], None),
        (["词" * 20, "睡眠"], None),
        (["Fear of loss", "Fear of heights", "Hunger", "Fear of the dark"], "begin with 'fear'"),
        (["The sun", "The moon", "The stars"], None),
        (["Fear of loss", "Fear of heights", "Hunger"], None),
    ],
)
def test_an_outline_that_is_none_is_noticed(headings: list[str], fault: str | None) -> None:
    reader = OutlineReader(most_alike=0.7, example_headings=ENGLISH.example_headings)
    reader.feed("".join(f"{number}. {heading}\n" for number, heading in enumerate(headings, 1)))
    reader.end()
    found = reader.find_fault()
    assert found is None if fault is None else fault in str(found)


@pytest.mark.parametrize(
    ("reply", "headings"),
    [
        ("1. Sleep well\n2. Sleep well\n3. Un", ["Sleep well"]),  # not "Un"
        ("1. Sleep well\n2. Eat\n3. Un", ["Sleep well", "Eat"]),
        ("1. Sleep well\n2. Ea", ["Sleep well"]),
    ],
)
def test_half_a_heading_is_no_point(reply: str, headings: list[str]) -> None:
    reader = OutlineReader()
    reader.feed(reply)
    reader.end(is_cut=True)
    assert reader.headings == headings


def test_a_short_heading_is_certain_at_the_end_of_its_line() -> None:
    """So that an outline of as many points as are wanted ends there, not a few tokens later."""
    reader = OutlineReader(max_points=3, most_words=8)
    reader.reply_start = "1."
    reader.feed(" Sleep\n2. Food\n3. Water")
    assert not reader.is_over
    reader.feed("\n")
    assert reader.is_over
    assert reader.headings == ["Sleep", "Food", "Water"]


def test_headings_have_a_fault_until_there_are_enough_and_they_differ() -> None:
    reader = OutlineReader(most_words=8, most_alike=0.7, fewest=3)
    sure, headings = [], ("Fear of loss", "Fear of heights", "Fear of the dark", "Hunger", "Thirst", "Cold")
    for line in (f"{number}. {heading}\n" for number, heading in enumerate(headings, 1)):
        reader.feed(line)
        sure.append(reader.find_fault() is None)
    assert sure == [False] * 5 + [True]
