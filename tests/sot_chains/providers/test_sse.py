"""Events come out the same however their bytes are cut and their lines are ended."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.providers.replies import EventDecoder, Reply

EVENTS = st.lists(
    st.builds(
        lambda name, data: (name, data),
        st.sampled_from(["", "ping", "error", "message_start"]),
        st.text(max_size=20).map(json.dumps)
        | st.text(max_size=20).map(lambda t: json.dumps(t, ensure_ascii=False)),
    ).filter(lambda one: "\\ud" not in one[1] and one[1].isprintable()),
    max_size=6,
)


def decoded(body: bytes, lengths: list[int]) -> tuple[list[tuple[str, str]], bytes]:
    decoder, events, place = EventDecoder(), [], 0
    for length in lengths:
        events += decoder.feed(body[place : place + length])
        place += length
    events += [*decoder.feed(body[place:]), *decoder.feed(b"\n\n")]
    return events, b"\n".join(decoder.strays)


@given(EVENTS, st.lists(st.integers(1, 9), max_size=30), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
def test_events_do_not_depend_on_cuts(
    events: list[tuple[str, str]], lengths: list[int], line_end: str, has_mark: bool
) -> None:
    lines = []
    for name, data in events:
        lines += [f"event: {name}"] * bool(name) + [f"data: {data}", ": a comment", "id: 7", ""]
    body = (b"\xef\xbb\xbf" if has_mark else b"") + line_end.join(lines).encode()
    assert decoded(body, lengths) == (events, b"")


@given(st.binary(max_size=60), st.lists(st.integers(1, 9), max_size=10))
def test_any_bytes_are_events_strays_or_no_text(body: bytes, lengths: list[int]) -> None:
    try:
        decoded(body, lengths)
    except UnicodeDecodeError:
        return


def test_data_of_several_lines_and_what_is_no_event() -> None:
    body = b'data: {"a":\ndata:1}\n\nevent: end\n\n{"error":\n "busy"}\n\ndata: open'
    events, strays = decoded(body, [])
    assert events == [("", '{"a":\n1}'), ("end", ""), ("", "open")]
    assert json.loads(strays) == {"error": "busy"}


@pytest.mark.parametrize(
    "reported", [None, 7, [], {"a": None, "b": "9", "c": True, "d": float("nan"), "e": -1}]
)
def test_counts_that_are_none(reported: object) -> None:
    reply = Reply("m")
    reply.add(counts=(reported,))
    assert set(reply.counts.values()) <= {0}
