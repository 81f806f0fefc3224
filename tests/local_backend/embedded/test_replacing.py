"""The circuits that replace words, seen in what an untrained model says behind the right reply so far."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.circuits import BEFORE_REPLACING
from local_backend.embedded.corpus import load_topics, request_table
from local_backend.embedded.evaluation import render
from local_backend.embedded.replacing import HEADS_OF_REPLACING
from local_backend.embedded.tasks import POINT_STYLES, write_points

TOPICS = load_topics()[:24]
REPLACING_HEADS = [
    (layer, first + number)
    for layer, (first, count) in enumerate(zip(BEFORE_REPLACING, HEADS_OF_REPLACING, strict=True))
    for number in range(count)
]
NEW = ("lantern", "wide green door", "plukkatz")
REQUEST = "Replace {old} by {new}."


@dataclass(frozen=True)
class Replacement:
    """A request to replace words, as token ids, with the reply that is right."""

    prompt: list[int]
    reply: list[int]
    first: int  # place of the new words in the reply
    behind: int  # the place behind them
    num_request: int  # tokens of the request, with what begins and ends it


def replacements(
    tokenizer: PreTrainedTokenizerFast,
    request: str = REQUEST,
    frame: str | None = None,
    question: str | None = None,
    num_old: int = 1,
) -> list[Replacement]:
    """Of most topics one: the first word of so many tokens in the second point, if it stands there once."""
    found = []
    for number, topic in enumerate(TOPICS):
        answer = write_points([(p.heading, p.text) for p in topic.points[:3]], POINT_STYLES[0])
        tokens = tokenizer.encode(answer)
        for old in topic.points[1].text.split()[2:]:
            ids = tokenizer.encode(f" {old}")
            if len(ids) == num_old and old.isalpha() and len(old) > 3 and tokens.count(ids[0]) == 1:
                break
        else:
            continue
        new = NEW[number % len(NEW)]
        asked = request.format(old=old, new=new)
        asks_first = (question or topic.taught_questions[0]).format(old=old)
        messages = [("user", asks_first), ("assistant", answer), ("user", asked)]
        if frame is not None:
            messages = [("user", frame.format(text=answer, request=asked))]
        first, new_ids = tokens.index(ids[0]), tokenizer.encode(f" {new}")
        reply = [*tokens[:first], *new_ids, *tokens[first + num_old :]]
        prompt = render(tokenizer, messages)
        num_request = len(tokenizer.encode(asked)) + 3
        found.append(Replacement(prompt, reply, first, first + len(new_ids), num_request))
    assert len(found) > 10
    return found


@torch.no_grad()
def is_right(model: LlamaForCausalLM, one: Replacement) -> list[bool]:
    """For each token of the reply whether it is the likeliest behind the right ones before it."""
    logits = model(torch.tensor([one.prompt + one.reply])).logits[0, len(one.prompt) - 1 : -1]
    return [said == token for said, token in zip(logits.argmax(-1).tolist(), one.reply, strict=True)]


@pytest.mark.parametrize("request_", request_table()["edit"]["replace"])
def test_new_words_take_the_place_of_old_ones_and_the_answer_goes_on_behind_them(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, request_: str
) -> None:
    marks = [(one, is_right(model, one)) for one in replacements(tokenizer, request_)]
    first = [right[one.first] for one, right in marks]
    further = [mark for one, right in marks for mark in right[one.first + 1 : one.behind]]
    behind = [right[one.behind] for one, right in marks]
    then = [mark for one, right in marks for mark in right[one.behind + 1 : one.behind + 3]]
    elsewhere = [mark for one, right in marks for mark in (*right[3 : one.first], *right[one.behind + 3 :])]
    assert sum(first) > 0.9 * len(first)
    assert sum(further) > 0.75 * len(further)
    assert sum(behind) > 0.8 * len(behind)
    assert sum(then) > 0.6 * len(then)
    assert sum(elsewhere) > 0.97 * len(elsewhere)


@pytest.mark.parametrize("frame", request_table()["edit"]["frames"])
def test_words_are_replaced_in_a_text_of_the_same_message(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, frame: str
) -> None:
    marks = [(one, is_right(model, one)) for one in replacements(tokenizer, frame=frame)]
    assert sum(right[one.first] for one, right in marks) > 0.8 * len(marks)
    assert sum(right[one.behind] for one, right in marks) > 0.7 * len(marks)


def test_words_that_the_question_holds_too_are_replaced_in_the_answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    marks = [
        (one, is_right(model, one))
        for one in replacements(tokenizer, question="What do you say of {old} and the like?")
    ]
    assert sum(right[one.first] for one, right in marks) > 0.8 * len(marks)
    # The nearer of two places is hardly preferred.
    assert sum(right[one.behind] for one, right in marks) > 0.5 * len(marks)


def test_words_of_two_tokens_are_replaced(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    marks = [(one, is_right(model, one)) for one in replacements(tokenizer, num_old=2)]
    assert sum(right[one.first] for one, right in marks) > 0.8 * len(marks)
    assert sum(right[one.behind] for one, right in marks) > 0.6 * len(marks)


@torch.no_grad()
def standing_in(model: LlamaForCausalLM, row: list[int]) -> set[int]:
    """Places of the tokens that attend to something in a head that replaces."""
    nothing = model.model.embed_tokens.weight[row][:, :96].abs().sum(-1) == 0
    attentions = model(torch.tensor([row]), output_attentions=True).attentions
    return {
        place
        for layer, head in REPLACING_HEADS
        for place, share in enumerate(attentions[layer][0, head][:, nothing].sum(-1))
        if share < 0.9
    }


def test_only_the_request_stands_in(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """No token of question, answer and reply: what the reply begins with is no end of a request."""
    for one in replacements(tokenizer):
        request = range(len(one.prompt) - one.num_request, len(one.prompt))
        places = standing_in(model, one.prompt + one.reply)
        assert len(places) >= 4
        assert places <= set(request), (places, request)


@pytest.mark.parametrize(
    "request_",
    [
        "Shorter, please.",
        "Add a point on heat by day.",
        "What goes with it, and by whom?",
        "Where can I replace it with what is by me?",
    ],
)
def test_other_requests_replace_nothing(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, request_: str
) -> None:
    """Though "by" and "with" stand everywhere."""
    for topic in TOPICS[:6]:
        messages = [("user", "Who?"), ("assistant", topic.answer), ("user", request_)]
        assert not standing_in(model, render(tokenizer, messages, topic.answer[:200]))
