"""Reasoning never reaches the answer, wherever the stream is cut; a mention of its tags stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.filters.reasoning import ReasoningFilter

THOUGHT = "The user asks for a plan.\n\n1. Maybe\n2. Perhaps\nSo I will list two points."
ANSWER = "1. Plan the day\n2. Take breaks"
REPLIES = {
    "think": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}",
    "capitals": f"\n<Think>{THOUGHT}</THINK>{ANSWER}",
    "thinking": f"<thinking>{THOUGHT}</thinking>\n{ANSWER}",
    "empty": f"<think>\n\n</think>\n\n{ANSWER}",
    "twice": f"<think>{THOUGHT}</think>\n<think>And so.</think>\n{ANSWER}",
    "brackets": f"[THINK]{THOUGHT}[/THINK]{ANSWER}",
    "kimi": f"◁think▷{THOUGHT}◁/think▷{ANSWER}",
    "seed": f"<seed:think>{THOUGHT}</seed:think>{ANSWER}",
    "solution": f"<|begin_of_thought|>{THOUGHT}<|end_of_thought|>\n\n<|begin_of_solution|>\n{ANSWER}"
    "<|end_of_solution|>",
    "answer": f"<think>{THOUGHT}</think>\n<answer>\n{ANSWER}</answer>",
    "cohere": f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>",
    "harmony": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>"
    f"{ANSWER}<|return|>",
    "harmony without special tokens": f"analysis{THOUGHT}assistantfinal{ANSWER}",
    "granite": f"Here is my thought process:\n{THOUGHT}\n\nHere is my response:\n\n{ANSWER}",
    "closing tag alone": f"{THOUGHT}\n</think>\n\n{ANSWER}",
    "closing tag alone, tight": f"{THOUGHT}</think>{ANSWER}",
    "closing bracket alone": f"{THOUGHT}\n[/THINK]\n{ANSWER}",
}
MENTIONS = [
    "Models print <think> and </think> around their thoughts.",
    "The block ends with `</think>` in most templates.",
    "Close it with </think> and go on with the answer.",
    'Look for "</think>".',
    "I think <thinking> is a tag.",
    "analysis of the data shows nothing",
    "a < b and b </ c",
    "[THIN] ice",
    "<thinker> is a statue",
]


def filtered(reply: str, lengths: list[int], *, is_open: bool = False) -> tuple[str, ReasoningFilter]:
    """What a reader has in the end, who drops what turned out to be reasoning."""
    reasoning = ReasoningFilter(is_open=is_open)
    text, start = "", 0
    for length in [*lengths, len(reply)]:
        if start >= len(reply):
            break
        piece = reasoning.feed(reply[start : start + length])
        if reasoning.has_discarded:
            text, reasoning.has_discarded = "", False
        text += piece
        start += length
    return text + reasoning.end(), reasoning


@pytest.mark.parametrize("form", REPLIES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_the_answer_is_what_follows_reasoning(form: str, size: int) -> None:
    text, reasoning = filtered(REPLIES[form], [size] * len(REPLIES[form]))
    assert text.strip() == ANSWER
    assert ("two points" in reasoning.reasoning) == (form != "empty")


@pytest.mark.parametrize("form", [form for form in REPLIES if "alone" in form])
def test_a_block_that_is_known_to_be_open_gives_nothing_out_before_it_closes(form: str) -> None:
    reasoning = ReasoningFilter(is_open=True)
    given = [reasoning.feed(character) for character in REPLIES[form]]
    assert not reasoning.has_discarded
    assert ("".join(given) + reasoning.end()).strip() == ANSWER
    assert ReasoningFilter(is_open=True).feed(ANSWER) == ""
    assert filtered(ANSWER, [3] * 30, is_open=True)[0] == ANSWER  # it did not reason this time


@pytest.mark.parametrize("mention", MENTIONS)
def test_a_mention_stays(mention: str) -> None:
    for size in (1, 4, 1000):
        assert filtered(mention, [size] * len(mention))[0] == mention
        after = f"<think>{THOUGHT}</think>{mention}"
        assert filtered(after, [size] * len(after))[0] == mention


def test_reasoning_without_an_end_is_no_answer() -> None:
    for reply in (f"<think>{THOUGHT}", f"[THINK]{THOUGHT}", f"<|channel|>analysis<|message|>{THOUGHT}"):
        text, reasoning = filtered(reply, [3] * len(reply))
        assert text == ""
        assert reasoning.reasoning == THOUGHT


pieces = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<",
        "</",
        "think",
        ">",
        "[THINK]",
        "[/THINK]",
        "a b.",
        "\n",
        " ",
        "`",
        "<answer>",
        "1. x",
    ]
)


@given(st.lists(pieces, max_size=14).map("".join), st.lists(st.integers(1, 5), max_size=60), st.booleans())
def test_the_result_does_not_depend_on_where_the_stream_is_cut(
    reply: str, lengths: list[int], is_open: bool
) -> None:
    in_pieces, at_once = filtered(reply, lengths, is_open=is_open), filtered(reply, [], is_open=is_open)
    assert in_pieces[0] == at_once[0]
    assert in_pieces[1].reasoning == at_once[1].reasoning


@given(st.text("abc .\n,1"))
def test_text_without_tags_is_left_as_it_is(text: str) -> None:
    assert filtered(text, [1] * len(text))[0] == text
