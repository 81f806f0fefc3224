from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrieval_copy.citations import _PIECE, is_word, num_words, offsets, pieces


@given(st.text())
def test_the_pieces_joined_are_the_text(text: str) -> None:
    parts = pieces(text)
    assert "".join(parts) == text
    assert all(parts)
    assert offsets(parts)[-1] == len(text)


@given(st.text(st.characters(max_codepoint=127)))
def test_the_fast_way_for_ascii_cuts_like_the_general_one(text: str) -> None:
    text = text.translate(dict.fromkeys(range(0x1C, 0x20)))  # are these white space? Unicode is of two minds
    assert pieces(text) == _PIECE.findall(text)


def test_words_of_several_scripts() -> None:
    assert [part for part in pieces("Don’t panic, l'été_2 is x=[1].") if is_word(part)] == [
        "Don’t",
        "panic",
        "l'été_2",
        "is",
        "x",
        "1",
    ]
    assert num_words("窑炉可以打开") == 6
    assert num_words("เตาเผา") > 1
    assert num_words("... -- !") == 0


def test_marks_stay_with_what_they_modify() -> None:
    assert pieces("cafe\u0301 x") == ["cafe\u0301", " ", "x"]
    assert pieces("👩‍🏫!") == ["👩‍🏫", "!"]
