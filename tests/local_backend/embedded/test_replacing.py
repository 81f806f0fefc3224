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
WORDS = ("winter", "market", "paper", "garden", "window", "bread", "road", "morning", "light")
REQUEST = "Replace {old} by {new}."


@dataclass(frozen=True)
class Replacement:
    """A request to replace a word, as token ids, with the reply that is right."""

    prompt: list[int]
    reply: list[int]
    first: int  # place of the new words in the reply
    behind: int  # the place behind them
    num_request: int  # tokens of the request, with what begins and ends it


def replacements(
    tokenizer: PreTrainedTokenizerFast,
    request: str = REQUEST,
    *,
    frame: str | None = None,
    question: str | None = None,
    num_old: int = 1,
    num_new: int = 1,
) -> list[Replacement]:
    """Of most topics one: the first word of so many tokens in the second point, if it stands there once."""
    found = []
    for topic in TOPICS:
        answer = write_points([(p.heading, p.text) for p in topic.points[:3]], POINT_STYLES[0])
        tokens = tokenizer.encode(answer)
        for old in topic.points[1].text.split()[2:]:
            ids = tokenizer.encode(f" {old}")
            if len(ids) == num_old and old.isalpha() and len(old) > 3 and tokens.count(ids[0]) == 1:
                break
        else:
            continue
        fitting = [
            word for word in WORDS if len(tokenizer.encode(f" {word}")) == 1 and word not in answer.lower()
        ]
        new = " ".join(fitting[:num_new])
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
def test_a_new_word_takes_the_place_of_an_old_one_and_the_answer_goes_on_behind_it(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, request_: str
) -> None:
    marks = [(one, is_right(model, one)) for one in replacements(tokenizer, request_)]
    assert sum(right[one.first] for one, right in marks) > 0.9 * len(marks)
    assert sum(right[one.behind] for one, right in marks) > 0.9 * len(marks)
    then = [mark for one, right in marks for mark in right[one.behind + 1 : one.behind + 3]]
    elsewhere = [mark for one, right in marks for mark in (*right[3 : one.first], *right[one.behind + 3 :])]
    assert sum(then) > 0.7 * len(then)
    assert sum(elsewhere) > 0.97 * len(elsewhere)


@pytest.mark.parametrize("frame", request_table()["edit"]["frames"])
def test_a_word_is_replaced_in_a_text_of_the_same_message(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, frame: str
) -> None:
    marks = [(one, is_right(model, one)) for one in replacements(tokenizer, frame=frame)]
    assert sum(right[one.first] for one, right in marks) > 0.8 * len(marks)
    assert sum(right[one.behind] for one, right in marks) > 0.8 * len(marks)


def test_a_word_that_the_question_holds_too_is_replaced_in_the_answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Of two places the nearer is preferred."""
    question = "What do you say of {old} and the like?"
    marks = [(one, is_right(model, one)) for one in replacements(tokenizer, question=question)]
    assert sum(right[one.first] for one, right in marks) > 0.7 * len(marks)


@pytest.mark.parametrize(("num_old", "num_new"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_words_of_several_tokens_are_begun_where_they_are_to_stand(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_old: int, num_new: int
) -> None:
    """And said up to their second token; how the answer goes on behind them is learned."""
    marks = [(one, is_right(model, one)) for one in replacements(tokenizer, num_old=num_old, num_new=num_new)]
    said = [mark for one, right in marks for mark in right[one.first : one.behind]]
    assert sum(said) > 0.8 * len(said)


@torch.no_grad()
def standing_in(model: LlamaForCausalLM, row: list[int]) -> dict[int, set[int]]:
    """Of each head that replaces, by its number, the places of the tokens that attend to something in it."""
    nothing = model.model.embed_tokens.weight[row][:, :96].abs().sum(-1) == 0
    attentions = model(torch.tensor([row]), output_attentions=True).attentions
    return {
        number: {
            place for place, share in enumerate(attentions[layer][0, head][:, nothing].sum(-1)) if share < 0.9
        }
        for number, (layer, head) in enumerate(REPLACING_HEADS)
    }


def test_only_the_request_stands_in_and_one_token_of_the_reply_looks_like_another(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """No other token of question, answer and reply: "by" and "with" stand everywhere."""
    for one in replacements(tokenizer):
        first = len(one.prompt)
        request = set(range(first - one.num_request, first))
        old, returns, new, new_on = standing_in(model, one.prompt + one.reply).values()
        assert len(old & request) == len(new) == 1
        assert new <= request
        assert not new_on  # there is one new token only
        assert returns == {first + one.behind - 1}


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
    for topic in TOPICS[:6]:
        messages = [("user", "Who?"), ("assistant", topic.answer), ("user", request_)]
        places = standing_in(model, render(tokenizer, messages, topic.answer[:200]))
        assert not any(places.values()), topic.name
