"""The circuits that change an answer, seen in what an untrained model says behind the right reply so far."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.corpus import load_topics, request_table
from local_backend.embedded.editing import HEADS_OF_EDITING, successor
from local_backend.embedded.evaluation import ReplyPrompt, edit_prompts, render
from local_backend.embedded.quoting import HEADS_OF_QUOTING
from local_backend.embedded.stream import CODE, MATCHED, WORD
from local_backend.embedded.tokenization import token_traits

TOPICS = load_topics()[:12]
PROMPTS = edit_prompts(TOPICS)
EDITING_HEADS = [
    (layer, first + number)
    for layer, (first, count) in enumerate(zip(HEADS_OF_QUOTING, HEADS_OF_EDITING, strict=True))
    for number in range(count)
]


def of_kind(kind: str) -> list[ReplyPrompt]:
    return [prompt for prompt in PROMPTS if prompt.kind == kind]


@torch.no_grad()
def said_within(model: LlamaForCausalLM, row: list[int], num_prompt: int) -> list[int]:
    """The likeliest token at every place of a reply, and behind it, the right ones before it given."""
    said: Tensor = model(torch.tensor([row])).logits[0, num_prompt - 1 :].argmax(-1)
    return [int(token_id) for token_id in said]


@torch.no_grad()
def attends_to_nothing(model: LlamaForCausalLM, row: list[int], layer: int, head: int) -> list[bool]:
    """For each token whether the tokens called nothing get nearly all of a head's attention."""
    nothing = model.model.embed_tokens.weight[row][:, :96].abs().sum(-1) == 0
    attended = model(torch.tensor([row]), output_attentions=True).attentions[layer][0, head]
    return [bool(share > 0.9) for share in attended[:, nothing].sum(-1)]


@pytest.fixture(scope="module")
def words(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """For each token a number that is the same for a word in any case."""
    return token_traits(tokenizer, load_topics()).words


@pytest.mark.parametrize("frame", [None, *request_table()["edit"]["frames"]])
def test_a_shorter_answer_ends_behind_its_second_point_and_hardly_elsewhere(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, frame: str | None
) -> None:
    """Whether the answer is an earlier turn or stands in the message that asks."""
    ends, wrong, count = 0, 0, 0
    prompts = of_kind("shorter")
    for prompt in prompts:
        (_, text), (_, request) = prompt.messages[1:]
        messages = [("user", frame.format(text=text, request=request))] if frame else prompt.messages
        before, reply = render(tokenizer, messages), tokenizer.encode(prompt.reply)
        said = said_within(model, before + reply, len(before))
        ends += said[-1] == tokenizer.eos_token_id
        wrong += sum(one != other for one, other in zip(said[1:], reply[1:], strict=False))
        count += len(reply) - 1
    assert ends == len(prompts)
    assert wrong < 0.02 * count


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_heading_to_be_added_is_copied_from_the_request_behind_the_next_number(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[int], is_whole: bool
) -> None:
    """The first token whatever it is, and those behind it, of which too few stood there to be a match.

    Also behind whole answers, which have twice as many points as those that are taught to be changed.
    """
    first, further, wrong, count = [], [], 0, 0
    for topic, prompt in zip(TOPICS, of_kind("add"), strict=True):
        request, answer = prompt.messages[-1][1], topic.answer if is_whole else prompt.messages[1][1]
        if is_whole:
            request = 'Add a point on "what my neighbours say".'
        before = render(
            tokenizer, [("user", topic.taught_questions[0]), ("assistant", answer), ("user", request)]
        )
        heading = tokenizer.encode(request.split('"')[1])[:4]
        number = answer.count("\n\n") + 2
        copied = tokenizer.encode(answer)
        begun = tokenizer.encode(f"{answer}\n\n{number}. **")
        said = said_within(model, before + begun + heading[:-1], len(before))
        wrong += sum(one != other for one, other in zip(said[1:], copied[1:], strict=False))
        count += len(copied) - 1
        is_right = [
            words[one] == words[other] for one, other in zip(said[len(begun) :], heading, strict=True)
        ]
        first.append(is_right[0])
        further += is_right[1:]
    assert all(first)
    assert sum(further) > 0.6 * len(further)  # in this vocabulary, where words are many tokens
    assert wrong < 0.02 * count  # headings of the answer stay in their places


def test_a_whole_answer_made_shorter_ends_behind_its_second_point(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    for topic in TOPICS:
        messages = [
            ("user", topic.taught_questions[0]),
            ("assistant", topic.answer),
            ("user", "Make it shorter."),
        ]
        before, kept = render(tokenizer, messages), "\n\n".join(topic.answer.split("\n\n")[:2])
        said = said_within(model, before + tokenizer.encode(kept), len(before))
        assert said[-1] == tokenizer.eos_token_id


def test_only_what_is_asked_for_stands_in(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """All other tokens of request, answer and reply attend to nothing in these heads."""
    for prompt in PROMPTS:
        row = render(tokenizer, prompt.messages) + tokenizer.encode(prompt.reply)
        standing_in = {
            place
            for layer, head in EDITING_HEADS
            for place, is_nothing in enumerate(attends_to_nothing(model, row, layer, head))
            if not is_nothing
        }
        first = len(render(tokenizer, prompt.messages[:2])) - 1  # without the reply's beginning
        last = len(render(tokenizer, prompt.messages)) - 1
        assert all(first <= place < last for place in standing_in), prompt.messages
        expected = {"shorter": 1, "add": 3, "replace": 0}
        assert len(standing_in) == expected[prompt.kind], prompt.messages


def test_the_number_behind_a_number_is_the_next(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    digits = [tokenizer.encode(str(digit))[0] for digit in range(10)]
    codes = model.model.embed_tokens.weight.detach()[digits, WORD][:, : MATCHED[2]]
    assert codes.abs().allclose(torch.tensor(CODE))
    for one, following in itertools.pairwise(codes):
        assert torch.allclose(successor(codes) @ one, following, atol=1e-5)


def test_a_request_without_an_answer_stands_in_for_nothing(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Where no heading and no point stands before it, the request's tokens are as they were."""
    for request in ('Add a point on "several visits".', "Make your answer shorter."):
        row = render(tokenizer, [("user", "Good morning!"), ("assistant", "Hello."), ("user", request)])
        for layer, head in EDITING_HEADS:
            assert all(attends_to_nothing(model, row, layer, head))
