"""Text arrives whole characters at a time, adds up to the whole, and ends before a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from local_backend.requests.outputs import Detokenizer
from tests.tiny import tiny_tokenizer

TOKENIZER: PreTrainedTokenizerBase = tiny_tokenizer(400)


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(1, 4), max_size=60))
def test_pieces_add_up_and_no_character_is_cut(text: str, cuts: list[int]) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER)
    pieces, start = [], 0
    for cut in [*cuts, len(token_ids)]:
        pieces.append(detokenizer.push(token_ids[start : start + cut]))
        start += cut
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(
    text=st.text(alphabet="abc ", max_size=40),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER, stop)
    shown = ""
    for token in token_ids:
        shown += detokenizer.push([token])
        assert not any(one in shown for one in stop)
        if detokenizer.stopped:
            break
    shown += detokenizer.finish()
    ends = [text.find(one) for one in stop if one in text]
    if ends:
        assert detokenizer.stopped
        assert shown == text[: len(shown)]
        assert len(shown) >= min(ends)
        assert not any(one in shown for one in stop)
    else:
        assert shown == text


def test_a_continued_text_keeps_its_space() -> None:
    context = TOKENIZER.encode("1.", add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER, context_token_ids=context)
    assert detokenizer.push(TOKENIZER.encode(" Plan", add_special_tokens=False)) == " Plan"
