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


@dataclass(frozen=True)
class Replacement:
    """A request to replace words, as token ids, with the reply that is right."""

    prompt: list[int]
    reply: list[int]
    first: int  # place of the new words in the reply
    behind: int  # the place behind them


def replacement(tokenizer: PreTrainedTokenizerFast, number: int, request: str) -> Replacement | None:
    """The first word of the answer's second point that is one token and stands there once gives way."""
    topic = TOPICS[number]
    answer = write_points([(p.heading, p.text) for p in topic.points[:3]], POINT_STYLES[0])
    tokens = tokenizer.encode(answer)
    for old in topic.points[1].text.split()[2:]:
        ids = tokenizer.encode(f" {old}")
        if len(ids) == 1 and old.isalpha() and len(old) > 3 and tokens.count(ids[0]) == 1:
            break
    else:
        return None
    new = NEW[number % len(NEW)]
    messages = [
        ("user", topic.taught_questions[0]),
        ("assistant", answer),
        ("user", request.format(old=old, new=new)),
    ]
    first, count = tokens.index(ids[0]), len(tokenizer.encode(f" {new}"))
    reply = [*tokens[:first], *tokenizer.encode(f" {new}"), *tokens[first + 1 :]]
    return Replacement(render(tokenizer, messages), reply, first, first + count)


@pytest.fixture(scope="module", params=request_table()["edit"]["replace"])
def replacements(tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest) -> list[Replacement]:
    """One of each topic, asked for in the same words."""
    made = [replacement(tokenizer, number, str(request.param)) for number in range(len(TOPICS))]
    found = [one for one in made if one is not None]
    assert len(found) > len(TOPICS) // 2
    return found


@torch.no_grad()
def is_right(model: LlamaForCausalLM, one: Replacement) -> list[bool]:
    """For each token of the reply whether it is the likeliest behind the right ones before it."""
    logits = model(torch.tensor([one.prompt + one.reply])).logits[0, len(one.prompt) - 1 : -1]
    return [said == token for said, token in zip(logits.argmax(-1).tolist(), one.reply, strict=True)]


def test_new_words_take_the_place_of_old_ones_and_the_answer_goes_on_behind_them(
    model: LlamaForCausalLM, replacements: list[Replacement]
) -> None:
    marks = [(one, is_right(model, one)) for one in replacements]
    first = [right[one.first] for one, right in marks]
    further = [mark for one, right in marks for mark in right[one.first + 1 : one.behind]]
    behind = [right[one.behind] for one, right in marks]
    then = [mark for one, right in marks for mark in right[one.behind + 1 : one.behind + 3]]
    elsewhere = [mark for one, right in marks for mark in (*right[3 : one.first], *right[one.behind + 3 :])]
    assert sum(first) > 0.9 * len(first)
    assert sum(further) > 0.8 * len(further)
    assert sum(behind) > 0.8 * len(behind)
    assert sum(then) > 0.6 * len(then)
    assert sum(elsewhere) > 0.97 * len(elsewhere)


@pytest.mark.parametrize(
    "request_",
    ["Shorter, please.", "Add a point on heat by day.", "What goes with it, and by whom?", "It is by me."],
)
def test_other_requests_replace_nothing(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, request_: str
) -> None:
    """No token attends to anything but nothing, though "by" and "with" stand everywhere."""
    for topic in [topic for topic in TOPICS[:8] if "replace" not in topic.answer]:
        row = render(
            tokenizer, [("user", "Who?"), ("assistant", topic.answer), ("user", request_)], topic.answer[:200]
        )
        nothing = model.model.embed_tokens.weight[row][:, :96].abs().sum(-1) == 0
        with torch.no_grad():
            attentions = model(torch.tensor([row]), output_attentions=True).attentions
        for layer, head in REPLACING_HEADS:
            assert attentions[layer][0, head][:, nothing].sum(-1).min() > 0.9, (layer, head)
