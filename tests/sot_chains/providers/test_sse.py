"""Events come out the same however their bytes are cut and their lines are ended."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sot_chains.providers.reading import Counts
from sot_chains.providers.sse import EventDecoder, ServerEvent

EVENTS = st.lists(
    st.builds(
        ServerEvent,
        st.sampled_from(["", "ping", "error", "message_start"]),
        st.text(max_size=20).map(json.dumps)
        | st.text(max_size=20).map(lambda t: json.dumps(t, ensure_ascii=False)),
    ).filter(lambda one: "\\ud" not in one.data and one.data.isprintable()),
    max_size=6,
)


def decoded(body: bytes, lengths: list[int]) -> tuple[list[ServerEvent], bytes]:
    decoder, events, place = EventDecoder(), [], 0
    for length in lengths:
        events += decoder.feed(body[place : place + length])
        place += length
    events += [*decoder.feed(body[place:]), *decoder.end()]
    return events, b"\n".join(decoder.strays)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.lists(st.integers(1, 9), max_size=30), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
def test_events_do_not_depend_on_cuts(
    events: list[ServerEvent], lengths: list[int], line_end: str, has_mark: bool
) -> None:
    lines = []
    for one in events:
        lines += [f"event: {one.name}"] * bool(one.name) + [f"data: {one.data}", ": a comment", "id: 7", ""]
    body = (b"\xef\xbb\xbf" if has_mark else b"") + line_end.join(lines).encode()
    assert decoded(body, lengths) == (events, b"")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(1, 9), max_size=10))
def test_any_bytes_are_events_strays_or_no_text(body: bytes, lengths: list[int]) -> None:
    try:
        decoded(body, lengths)
    except UnicodeDecodeError:
        return


def test_data_of_several_lines_and_what_is_no_event() -> None:
    body = b'data: {"a":\ndata:1}\n\nevent: end\n\n{"error":\n "busy"}\n\ndata: open'
    events, strays = decoded(body, [])
    assert events == [ServerEvent("", '{"a":\n1}'), ServerEvent("end", ""), ServerEvent("", "open")]
    assert json.loads(strays) == {"error": "busy"}


@pytest.mark.parametrize(
    "reported", [None, 7, [], {"a": None, "b": "9", "c": True, "d": float("nan"), "e": -1}]
)
def test_counts_that_are_none(reported: object) -> None:
    counts = Counts()
    counts.note(reported)
    assert {counts[name] for name in "abcde"} == {0}
