"""The circuits that replace words, seen in what an untrained model says behind the right reply so far."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.circuits import held_weights, write_late_circuits
from local_backend.embedded.corpus import load_topics, request_table
from local_backend.embedded.evaluation import render
from local_backend.embedded.replacing import HEADS_OF_REPLACING
from local_backend.embedded.tasks import POINT_STYLES, write_points
from local_backend.embedded.tokenization import token_traits

TOPICS = load_topics()[:24]
WORDS = ("winter", "market", "paper", "garden", "window", "bread", "road", "morning", "light")
REQUEST = "Replace {old} by {new}."


@pytest.fixture(scope="module")
def late(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model with the circuits that are written late."""
    late = copy.deepcopy(model)
    write_late_circuits(late, token_traits(tokenizer, load_topics()))
    return late


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


@pytest.mark.parametrize(("num_old", "num_new"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 1)])
def test_new_words_take_the_place_of_old_ones_and_the_answer_goes_on_behind_them(
    late: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_old: int, num_new: int
) -> None:
    """Whatever number of tokens they are."""
    marks = [(one, is_right(late, one)) for one in replacements(tokenizer, num_old=num_old, num_new=num_new)]
    said = [mark for one, right in marks for mark in right[one.first : one.behind]]
    then = [mark for one, right in marks for mark in right[one.behind : one.behind + 2]]
    elsewhere = [mark for one, right in marks for mark in (*right[3 : one.first], *right[one.behind + 3 :])]
    print(num_old, num_new, sum(said)/len(said), sum(then)/len(then), sum(elsewhere)/len(elsewhere))
    assert sum(said) > 0.9 * len(said)
    assert sum(then) > 0.8 * len(then)
    assert sum(elsewhere) > 0.97 * len(elsewhere)


@pytest.mark.parametrize("request_", request_table()["edit"]["replace"])
def test_any_wording_is_understood(
    late: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, request_: str
) -> None:
    marks = [(one, is_right(late, one)) for one in replacements(tokenizer, request_)]
    print(request_, sum(right[one.first] for one, right in marks), sum(right[one.behind] for one, right in marks), len(marks))
    assert sum(right[one.first] for one, right in marks) > 0.9 * len(marks)
    assert sum(right[one.behind] for one, right in marks) > 0.8 * len(marks)


@pytest.mark.parametrize("frame", request_table()["edit"]["frames"])
def test_a_word_is_replaced_in_a_text_of_the_same_message(
    late: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, frame: str
) -> None:
    marks = [(one, is_right(late, one)) for one in replacements(tokenizer, frame=frame)]
    print(frame, sum(right[one.first] for one, right in marks), sum(right[one.behind] for one, right in marks), len(marks))
    assert sum(right[one.first] for one, right in marks) > 0.8 * len(marks)
    assert sum(right[one.behind] for one, right in marks) > 0.8 * len(marks)


def test_a_word_that_the_question_holds_too_is_replaced_in_the_answer(
    late: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Of two places the nearer is preferred."""
    question = "What do you say of {old} and the like?"
    marks = [(one, is_right(late, one)) for one in replacements(tokenizer, question=question)]
    print(sum(right[one.first] for one, right in marks), len(marks))
    assert sum(right[one.first] for one, right in marks) > 0.7 * len(marks)


@torch.no_grad()
def noticed(model: LlamaForCausalLM, row: list[int]) -> list[set[int]]:
    """Of each head that replaces the places of the tokens that attend to something in it."""
    nothing = model.model.embed_tokens.weight[row][:, :96].abs().sum(-1) == 0
    attentions = model(torch.tensor([row]), output_attentions=True).attentions
    return [
        {place for place, share in enumerate(attentions[layer][0, head][:, nothing].sum(-1)) if share < 0.9}
        for layer, head in HEADS_OF_REPLACING
    ]


def test_in_a_reply_only_the_last_new_token_and_the_one_behind_it_look_like_others(
    late: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """And in the prompt the request alone is changed: "by" and "with" stand everywhere."""
    num_clean = 0
    cases = replacements(tokenizer)
    for one in cases:
        first = len(one.prompt)
        old, new, new_on, _, last, behind = noticed(late, one.prompt + one.reply)
        request = set(range(first - one.num_request, first))
        assert new <= request and len(new) == 1
        assert not new_on  # there is one new token only
        replied = {place - first for place in (*last, *behind) if place >= first}
        num_clean += old <= request and replied == {one.behind - 1, one.behind}
    print(num_clean, len(cases))
    assert num_clean > 0.7 * len(cases)


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
    late: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, request_: str
) -> None:
    """No token is given others' notes; ends look for what begins a reply, and bring nothing."""
    for topic in TOPICS[:6]:
        messages = [("user", "Who?"), ("assistant", topic.answer), ("user", request_)]
        old, new, new_on, _, last, behind = noticed(late, render(tokenizer, messages, topic.answer[:200]))
        assert not (old or new or new_on or last or behind), topic.name


def test_what_is_written_late_is_held(late: LlamaForCausalLM, model: LlamaForCausalLM) -> None:
    """Training neither changes the late heads nor writes into their coordinates."""
    masks, changed = held_weights(late, late=True), 0
    for name, weight in late.named_parameters():
        differs = weight != model.get_parameter(name)
        if any(part in name for part in ("gate_proj", "up_proj", "lm_head")):
            continue  # what reads the coordinates begins at zero, and learns to
        is_read = differs & ~masks[name]
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            is_read = is_read & (late.get_parameter(name) != 0)
        assert not is_read.any(), name
        changed += int(differs.sum())
    assert changed
