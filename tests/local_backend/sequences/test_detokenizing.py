"""Text arrives whole characters at a time, adds up to the whole, and ends before a stop string."""

from __future__ import annotations

import functools
import random
import re
from itertools import compress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from local_backend import Engine, SamplingParams
from local_backend.sequences.detokenizing import Detokenizer
from tests.families import KINDS
from tests.tiny import tiny_chat_model, tiny_tokenizer

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


def test_special_tokens_are_kept_where_they_are_asked_for() -> None:
    start, end = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    token_ids = [*TOKENIZER.encode("a é", add_special_tokens=False), start, *TOKENIZER.encode("b"), end]
    for keep, text in ((True, "a é<|im_start|>b<|im_end|>"), (False, "a éb")):
        detokenizer = Detokenizer(TOKENIZER, keep_special_tokens=keep)
        pieces = [detokenizer.push([token_id]) for token_id in token_ids]
        assert "".join([*pieces, detokenizer.finish()]) == text
        assert Detokenizer(TOKENIZER, ["zz"], keep_special_tokens=keep).push(token_ids) == text


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
        if detokenizer.stops.is_reached:
            break
    shown += detokenizer.finish()
    ends = [text.find(one) for one in stop if one in text]
    if ends:
        assert detokenizer.stops.is_reached
        assert shown == text[: len(shown)]
        assert len(shown) >= min(ends)
        assert not any(one in shown for one in stop)
    else:
        assert shown == text


def test_a_continued_text_keeps_its_space() -> None:
    context = TOKENIZER.encode("1.", add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER, context_token_ids=context)
    assert detokenizer.push(TOKENIZER.encode(" Plan", add_special_tokens=False)) == " Plan"


# --- every kind of tokenizer

SPECIAL = ["<|begin|>", "<|end|>"]


@functools.cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def _pieces(
    tokenizer: PreTrainedTokenizerFast, token_ids: list[int], seed: int, **given: object
) -> list[str]:
    """The text of a stream, in updates of one to four tokens."""
    rng = random.Random(seed)
    detokenizer = Detokenizer(tokenizer, **given)  # type: ignore[arg-type]  # its other arguments
    pieces, start = [], 0
    while start < len(token_ids):
        stop = start + rng.choice([1, 1, 1, 2, 4])
        pieces.append(detokenizer.push(token_ids[start:stop]))
        start = stop
    return [*pieces, detokenizer.finish()]


def _decoded(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def _token_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Any tokens, and runs of those that are bytes or special tokens."""
    tokenizer = _tokenizer(kind)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    few = [token for token, name in enumerate(names) if name.startswith("<") or len(name) == 1]
    texts = st.text(st.sampled_from("ab \n.é漢🎉\u200d�"), max_size=12)
    return st.lists(
        st.one_of(
            st.integers(0, len(tokenizer) - 1).map(lambda token: [token]),
            st.lists(st.sampled_from(few), max_size=8),
            texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        ),
        max_size=10,
    ).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), seed=st.integers(0, 9))
def test_the_text_is_what_the_tokenizer_decodes_from_the_whole(
    kind: str, data: st.DataObject, seed: int
) -> None:
    tokenizer = _tokenizer(kind)
    token_ids = data.draw(_token_ids(kind))
    whole = _decoded(tokenizer, token_ids)
    assert "".join(_pieces(tokenizer, token_ids, seed)) == whole
    # A stop string that does not occur changes nothing, though it makes every token an update.
    assert "".join(_pieces(tokenizer, token_ids, seed, stop=("\0never", "<|never|>"))) == whole


@pytest.mark.parametrize("kind", ["byte_level", "llama_2", "mistral", "gemma"])
@pytest.mark.parametrize("stop", [(), ("###",)])
def test_characters_in_bytes_are_whole(kind: str, stop: tuple[str, ...]) -> None:
    text = "Well done! 🎉🎉🎉🎉🎉 See you. 漢字é"
    tokenizer = _tokenizer(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for seed in range(5):
        pieces = _pieces(tokenizer, token_ids, seed, stop=stop)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "mistral", "gemma"])
@given(data=st.data(), seed=st.integers(0, 9))
def test_text_ends_before_a_stop_string_of_any_characters(kind: str, data: st.DataObject, seed: int) -> None:
    """Stop strings of letters, of characters in bytes, and of special tokens or parts of them."""
    tokenizer = _tokenizer(kind)
    parts = data.draw(st.lists(st.sampled_from(["ab", "c", "🎉", "é", *SPECIAL]), min_size=1, max_size=12))
    whole = "".join(parts)
    begin = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[begin : data.draw(st.integers(begin + 1, min(len(whole), begin + 14)))]
    token_ids = tokenizer.encode("x" + whole, add_special_tokens=False)  # no space is added after it
    wanted = "x" + _without(SPECIAL, whole, whole.index(stop))
    assert "".join(_pieces(tokenizer, token_ids, seed, stop=(stop,))) == wanted


def _without(special: list[str], text: str, end: int) -> str:
    """The first ``end`` characters of ``text``, without those of special tokens."""
    is_text = [True] * len(text)
    for token in special:
        for found in re.finditer(re.escape(token), text):
            is_text[found.start() : found.end()] = [False] * len(token)
    return "".join(compress(text[:end], is_text))


@example(context="🎉", answer=" a")
@example(context="1.", answer="🎉 a")
@given(context=st.text("ab .é🎉", min_size=1, max_size=8), answer=st.text("ab .é🎉", min_size=1, max_size=8))
@pytest.mark.parametrize("kind", ["byte_level", "llama_2", "mistral", "gemma"])
@settings(deadline=None)
def test_a_continued_text_is_what_follows_the_context(kind: str, context: str, answer: str) -> None:
    tokenizer = _tokenizer(kind)
    before = tokenizer.encode("x " + context, add_special_tokens=False)
    after = tokenizer.encode("x" + answer, add_special_tokens=False)
    after = after[len(tokenizer.encode("x", add_special_tokens=False)) :]
    if "x" + answer != _decoded(tokenizer, [*tokenizer.encode("x", add_special_tokens=False), *after]):
        return  # "x" and the answer share a token
    assert "".join(_pieces(tokenizer, after, 0, context_token_ids=before)) == answer


# --- against transformers


class _Scripted:
    """A logits processor that has the model write given tokens."""

    def __init__(self, num_prompt_tokens: int, token_ids: list[int]) -> None:
        self._num_prompt_tokens, self._token_ids = num_prompt_tokens, token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self._num_prompt_tokens
        forced = torch.full_like(scores, -1e9)
        forced[:, self._token_ids[place % len(self._token_ids)]] = 0.0
        return forced


@pytest.mark.parametrize(
    "stop",
    ["<|im_start|>", "bread<|im_start|>", "<|im_start|>day", "read<|im", "rt|>d", "start", "day", "|><|"],
)
def test_it_stops_where_generate_stops(stop: str) -> None:
    tokenizer, model = tiny_tokenizer(), tiny_chat_model()
    text = "bake bread<|im_start|>day by day<|im_start|><|im_start|>bread"
    script = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode("Hello", add_special_tokens=False)
    processor = _Scripted(len(prompt), script)
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=len(script),
        logits_processor=LogitsProcessorList([processor]),
        stop_strings=[stop],
        tokenizer=tokenizer,
    )
    with Engine(model, tokenizer, "lookahead") as engine:
        params = SamplingParams(max_tokens=len(script), stop=(stop,), logits_processors=(processor,))
        (completion,) = engine.generate([prompt], params)
    assert completion.token_ids == output[0, len(prompt) :].tolist()
    assert completion.finish_reason == "stop"
    assert completion.text == _without(["<|im_start|>"], text, text.index(stop))
