"""The circuits that change an answer, seen in what an untrained model says behind the right reply so far."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.corpus import load_topics
from local_backend.embedded.editing import successor
from local_backend.embedded.evaluation import ReplyPrompt, edit_prompts, render
from local_backend.embedded.stream import CODE, MATCHED, WORD
from local_backend.embedded.tokenization import token_traits

PROMPTS = edit_prompts(load_topics()[:12])


@torch.no_grad()
def said_behind(model: LlamaForCausalLM, row: list[int]) -> int:
    """The likeliest token behind a row."""
    return int(model(torch.tensor([row])).logits[0, -1].argmax())


def of_kind(kind: str) -> list[ReplyPrompt]:
    return [prompt for prompt in PROMPTS if prompt.kind == kind]


@pytest.fixture(scope="module")
def words(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """For each token a number that is the same for a word in any case."""
    return token_traits(tokenizer, load_topics()).words


def test_a_shorter_answer_ends_behind_its_second_point(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    for prompt in of_kind("shorter"):
        before, reply = render(tokenizer, prompt.messages), tokenizer.encode(prompt.reply)
        assert said_behind(model, before + reply) == tokenizer.eos_token_id


def test_any_other_reply_goes_on_behind_its_second_point(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    (paragraph,) = tokenizer.encode("\n\n")
    shorter = {prompt.messages[0]: prompt.reply for prompt in of_kind("shorter")}
    for prompt in of_kind("add"):
        before, begun = render(tokenizer, prompt.messages), shorter[prompt.messages[0]]
        assert prompt.reply.startswith(begun)
        assert said_behind(model, before + tokenizer.encode(begun)) == paragraph


def test_a_heading_to_be_added_is_copied_from_the_request_behind_the_next_number(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[int]
) -> None:
    """The first token whatever it is, and those behind it, of which too few stood there to be a match."""
    right: list[list[bool]] = [[], [], [], []]
    for prompt in of_kind("add"):
        request, answer = prompt.messages[-1][1], prompt.messages[1][1]
        before = render(tokenizer, prompt.messages)
        cue = next(cue for cue in ("point on", "point about", "point:") if cue in request)
        heading = tokenizer.encode(request.split(cue, 1)[1].rstrip(".?"))
        number = answer.count("\n\n") + 2
        begun = before + tokenizer.encode(f"{answer}\n\n{number}. **")
        for place, token_id in enumerate(heading[: len(right)]):
            said = said_behind(model, begun + heading[:place])
            right[place].append(words[said] == words[token_id])
    assert all(right[0])
    further = [mark for marks in right[1:] for mark in marks]
    assert sum(further) > 0.85 * len(further), [sum(marks) / len(marks) for marks in right]


def test_headings_of_the_answer_stay_in_their_places(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The heading to be added does not come in where one of the answer's is to be copied."""
    for prompt in of_kind("add"):
        before, answer = render(tokenizer, prompt.messages), prompt.messages[1][1]
        points = answer.split("\n\n")
        for number in range(2, len(points) + 1):
            begun = "\n\n".join([*points[: number - 1], f"{number}. **"])
            heading = tokenizer.encode(f"{begun}{points[number - 1].split('**')[1]}")[
                len(tokenizer.encode(begun)) :
            ]
            assert said_behind(model, before + tokenizer.encode(begun)) == heading[0]


def test_the_number_behind_a_number_is_the_next(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    digits = [tokenizer.encode(str(digit))[0] for digit in range(10)]
    codes = model.model.embed_tokens.weight.detach()[digits, WORD][:, : MATCHED[2]]
    assert codes.abs().allclose(torch.tensor(CODE))
    for one, next_one in itertools.pairwise(codes):
        assert torch.allclose(successor(codes) @ one, next_one, atol=1e-5)


def test_a_request_without_an_answer_stands_in_for_nothing(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Where no heading and no point stands before it, the request's tokens are as they were."""
    for request in ("Add a point on several visits.", "Shorter, please."):
        row = torch.tensor([render(tokenizer, [("user", request)])])
        for layer, head in ((1, 2), (1, 3), (2, 1)):
            with torch.no_grad():
                attended = model(row, output_attentions=True).attentions[layer][0, head]
            assert (attended[:, 0] > 0.9).all()
