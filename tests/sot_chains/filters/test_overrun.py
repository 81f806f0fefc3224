"""What a filter gives out stays, does not depend on how the text is cut, and ends where it should."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.filters.points import OverrunFilter, Pipeline, TextFilter, WholeSentences
from sot_chains.outline.skeleton import Point
from sot_chains.providers.replies import LoopGuard

HEADINGS = ["Fixed hours", "Dark room", "Less coffee", "Sport"]


def guarded(guard: TextFilter, text: str, lengths: list[int]) -> str:
    given, start = "", 0
    for length in [*lengths, len(text)]:
        if guard.is_over or start >= len(text):
            break
        given += guard.feed(text[start : start + length])
        start += length
    return given if guard.is_over else given + guard.end()


def overrun(number: int) -> OverrunFilter:
    return OverrunFilter(Point(number, HEADINGS[number - 1]), [heading.casefold() for heading in HEADINGS])


OWN = "Close the curtains. It helps."


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "other",
    [
        *(
            "3. Less coffee: Drink none.",
            "3) Less coffee",
            "(3) Less coffee",
            "**3.** Less",
            "### 3. Less coffee",
        ),
        *("３．Less coffee", "3、Less coffee", "4. Sport", "5. More", "1. Fixed hours: Go to bed."),
        *(
            "Less coffee: Drink none.",
            "**Less coffee**",
            "Less coffee\nDrink none.",
            "LESS COFFEE:",
            "- Sport: Run.",
        ),
    ],
)
def test_a_point_ends_where_another_one_begins(other: str, size: int) -> None:
    for between in ("\n", "\n\n", "\n  "):
        guard = overrun(2)
        text = OWN + between + other + "\nMore."
        assert guarded(guard, text, [size] * len(text)).rstrip() == OWN
        assert guard.is_over


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2, OWN),
        (2, "Do it thus:\n1. Close the door\n2. Close the window\n3. Close the curtains\nThen sleep."),
        (1, "Do it thus:\n1. Rise at six\n2. Rise again\n3. Stay up"),
        (2, "In\n2024. the year, it was dark.\n3.5 lux are enough."),
        (2, "Less coffee helps, too.\nSport is another matter."),
        (2, "```\n3. Less coffee\nSport:\n```\nThat is all."),
        (2, "2. Dark room, again"),
        (2, "A line\n\n\nand another"),
        (3, "Drink none.\n*  or tea"),
    ],
)
def test_a_point_that_writes_itself_is_left_as_it_is(number: int, text: str, size: int) -> None:
    guard = overrun(number)
    assert guarded(guard, text, [size] * len(text)) == text
    assert not guard.is_over


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_point_ends_in_the_middle_of_a_line_where_another_one_begins(size: int) -> None:
    for other in (
        *("3. Less coffee: Drink none.", "**3. Less coffee**: Drink none.", "(4) Sport: Run."),
        *("3. Less light helps.", "4. Noise: Wear plugs. 5. Pets: Keep them out."),
    ):
        guard = overrun(2)
        assert guarded(guard, f"{OWN} {other}", [size] * 99).rstrip() == OWN
        assert guard.is_over
    for text in (
        f"{OWN} So: 1. Eat. 2. Rest. 3. Read.",
        f"{OWN} At 3. Sport",
        "It takes 3 hours or 3.5.",
        "2. 2. 2.",
    ):
        guard = overrun(2)
        assert guarded(guard, text, [size] * 99).rstrip() == text
        assert not guard.is_over


def test_a_text_passes_through_filters_in_turn() -> None:
    filters = Pipeline(lambda: [overrun(2), WholeSentences()])
    given = "".join(filters.feed(piece) for piece in (OWN, " And th", "en\n3. Less coffee: no"))
    assert given == f"{OWN} And then"
    assert isinstance(filters.ended_by, OverrunFilter)
    # A loop may end within a sentence, of which nothing is left.
    filters = Pipeline(lambda: [LoopGuard(), WholeSentences()])
    text = f"It helps. They {LINE}, {LINE}, {LINE}."
    assert "".join(filters.feed(character) for character in text) == "It helps."
    assert filters.end() == "", "what was dropped does not come back once the call has ended"
    filters = Pipeline(lambda: [LoopGuard(), WholeSentences()])  # not of the only one either
    assert "".join(filters.feed(character) for character in text.removeprefix("It helps. ")) == ""


def test_an_overrun_at_the_beginning_leaves_nothing() -> None:
    guard = overrun(2)
    assert guarded(guard, "3. Less coffee: Drink none.", [1] * 40) == ""
    assert guard.is_over


LINE = "the cat sat on the mat and looked at me"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_loop_ends_before_its_first_repetition(size: int) -> None:
    for text, kept in (
        (f"Well: {LINE}, {LINE}, {LINE}, {LINE}.", f"Well: {LINE},"),
        (f"{LINE} {LINE} and then something else. {LINE}", f"{LINE} {LINE} and then something else."),
        ("very " * 40, "very"),
        ("我们应该保护环境因为环境重要，" * 5, "我们应该保护环境因为环境重要，"),
        ("About 1" + "0" * 500, "About 1" + "0" * 63),  # one word
    ):
        guard = LoopGuard()
        assert guarded(guard, text, [size] * len(text)) == kept
        assert guard.is_over
    twice = f"{LINE}; {LINE}."
    guard = LoopGuard()
    assert guarded(guard, twice, [size] * len(twice)) == twice
    assert not guard.is_over


words = st.lists(
    st.sampled_from(
        ["a", "b", "c ", " ", "\n", "1", "2.", "3. ", "Dark room", ":", "``", "`", "Sport", ".", "好"]
    ),
    max_size=40,
).map("".join)


@given(
    words,
    st.lists(st.integers(1, 4), max_size=60),
    st.sampled_from(["overrun", "loop", "sentences"]),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(text: str, lengths: list[int], kind: str) -> None:
    def made() -> TextFilter:
        return {
            "overrun": lambda: overrun(1),
            "loop": LoopGuard,
            "sentences": WholeSentences,
        }[kind]()

    whole = guarded(made(), text, [])
    assert guarded(made(), text, lengths).rstrip() == whole.rstrip()
    assert text.startswith(whole)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_bounded_text_ends_with_a_sentence_where_its_model_was_cut(size: int) -> None:
    def read(text: str, *, is_cut: bool) -> str:
        guard = WholeSentences()
        given = "".join(guard.feed(text[place : place + size]) for place in range(0, len(text), size))
        return given + guard.end(is_cut=is_cut)

    assert read("Water it well. Then feed it ev", is_cut=True) == "Water it well."
    assert read("Water it well. Then feed it", is_cut=False) == "Water it well. Then feed it"
    assert read("Water it well. Use these:", is_cut=False) == "Water it well."
    assert read("Water it ev", is_cut=True) == "Water it ev"  # there is nothing else
    assert read("Water i", is_cut=True) == read("Do this:", is_cut=False) == ""
    assert read("Do this. As here:\n- one\n- tw", is_cut=True) == "Do this. As here:\n- one"


def test_a_loop_is_cut_back_to_a_sentence() -> None:
    line = "The best way to keep it alive is to give it {} and then to wait."
    text = " ".join(line.format(what) for what in ("light", "water", "soil", "air", "food"))
    guard = LoopGuard()
    given = "".join(guard.feed(piece + " ") for piece in text.split(" "))
    assert guard.is_over
    assert given.rstrip().endswith("and then to wait.")


def test_a_number_of_a_list_is_no_sentence() -> None:
    item = "Keep it in the light of a window that looks to the south."
    for between in ("\n\n", " "):
        text = "".join(f"{number}. {item}{between}" for number in range(1, 9))
        guard = LoopGuard()
        given = "".join(guard.feed(piece + " ") for piece in text.split(" "))
        assert guard.is_over
        assert given.rstrip().endswith("south.")
    bound = WholeSentences()
    written = "The first thing. Then:\n\n1. light\n2. water\n3. so"
    given = "".join(bound.feed(character) for character in written) + bound.end(is_cut=True)
    assert given.rstrip().endswith("water")


def test_lines_without_sentences_go_on_being_streamed_after_a_repetition() -> None:
    guard = LoopGuard()
    given = guard.feed(f"{LINE}\n{LINE}\n")  # from here on sentences or lines are given out whole
    for number in range(9):
        given += guard.feed(f"row {number} has {number * 7} and {number * 11}\n")
        assert given.count("row") >= number
    assert not guard.is_over
