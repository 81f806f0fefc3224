"""The model that ships: small enough, rebuilt as told, and able to do what its card says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from local_backend import ChatLocal
from local_backend.embedded import WEIGHTS, closest_topic
from local_backend.embedded.build import (
    BuildOptions,
    batch_of_step,
    encode_example,
    main,
    make_model,
    train_tokenizer,
)
from local_backend.embedded.corpus import load_requests, load_topics, make_example
from sot_chains import Skeleton, parse_skeleton
from sot_chains.prompts import ENGLISH

TOPICS = load_topics()


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatLocal]:
    with ChatLocal.embedded() as chat:
        yield chat


def test_it_is_small_and_a_llama_of_stated_context() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 16_000_000
    config = json.loads((WEIGHTS / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 2048
    assert config["dtype"] == "bfloat16"


def test_it_computes_in_float32_unless_asked(chat: ChatLocal) -> None:
    assert chat.engine.model.dtype == torch.float32
    with ChatLocal.embedded(dtype=torch.bfloat16) as other:
        assert other.engine.model.dtype == torch.bfloat16


def test_the_corpus_has_the_breadth_it_claims() -> None:
    assert len(TOPICS) >= 25
    for topic in TOPICS:
        assert len(topic.points) >= 6
        assert len(set(topic.questions)) == len(topic.questions) >= 10


def test_it_is_taught_the_requests_that_are_sent() -> None:
    """The two packages may not import each other, so the wording stands twice; here it is held together."""
    taught = load_requests()
    assert taught["skeleton"].requests[0] == ENGLISH.skeleton
    assert taught["skeleton"].opening == ENGLISH.skeleton_opening
    assert taught["skeleton"].reply_start == ENGLISH.skeleton_prefill
    assert taught["expansion"].requests[0] == ENGLISH.expansion
    assert taught["expansion"].opening == ENGLISH.expansion_opening
    assert taught["expansion"].reply_start == ENGLISH.expansion_prefill


def test_it_writes_a_skeleton_when_asked(chat: ChatLocal) -> None:
    """Any phrasing yields an outline to work with; the taught ones nearly always the right one."""

    def outlines(questions: list[str]) -> list[Skeleton]:
        requests = [[("user", ENGLISH.skeleton.format(question=q)), ("ai", "1.")] for q in questions]
        return [parse_skeleton("1." + answer.text) for answer in chat.batch(requests)]

    taught = outlines([topic.taught_questions[0] for topic in TOPICS])
    held_out = outlines([topic.held_out_question for topic in TOPICS])
    assert all(3 <= len(skeleton.points) <= 10 for skeleton in taught + held_out)
    right = sum(outline.text == topic.skeleton for outline, topic in zip(taught, TOPICS, strict=True))
    assert right >= 0.8 * len(TOPICS)


def test_it_expands_a_point_and_answers_with_equal_substance(chat: ChatLocal) -> None:
    topics = random.Random(0).sample(TOPICS, 6)
    plain = chat.batch([topic.taught_questions[0] for topic in topics])
    for topic, answer in zip(topics, plain, strict=True):
        requests = [
            [
                (
                    "user",
                    ENGLISH.expansion.format(
                        question=topic.taught_questions[0],
                        skeleton=topic.skeleton,
                        number=number,
                        point=point.heading,
                    ),
                ),
                ("ai", f"{number}. {point.heading}:"),
            ]
            for number, point in enumerate(topic.points, 1)
        ]
        expansions = [expansion.text.strip() for expansion in chat.batch(requests)]
        assert all(1 <= text.count(".") <= 3 and 15 <= len(text.split()) <= 60 for text in expansions)
        together = sum(len(text.split()) for text in expansions)
        assert 0.7 * together <= len(answer.text.split()) <= 1.4 * together + 40


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("how do I bake a loaf of bread", "baking-bread"),
        ("Tips against stress at work?", "stress"),
        ("Who won the football match yesterday?", None),
        ("Write a poem about my cat", None),
        ("", None),
    ],
)
def test_it_knows_what_it_knows(question: str, name: str | None) -> None:
    topic = closest_topic(question)
    assert (topic.name if topic else None) == name


def test_branches_of_an_example_are_what_a_row_reads_alone() -> None:
    """Packed behind one prefix, under the mask, every point gets the logits it gets by itself."""
    tokenizer = train_tokenizer(TOPICS[:3], 500)
    model = make_model(BuildOptions(hidden_size=32, num_layers=2, num_heads=2), tokenizer).eval()
    example = encode_example(make_example("expansion", TOPICS[0], TOPICS[:3], random.Random(1)), tokenizer)
    from local_backend.embedded.build import collate

    packed = collate([example], tokenizer.pad_token_id)
    inputs = {name: packed[name] for name in ("input_ids", "position_ids", "attention_mask")}
    with torch.no_grad():
        logits = model(**inputs).logits[0]
        column = len(example.prefix_ids)
        assert len(example.branches) == len(TOPICS[0].points)
        for ids, _ in example.branches:
            alone = model(torch.tensor([example.prefix_ids + ids])).logits[0, len(example.prefix_ids) :]
            torch.testing.assert_close(logits[column : column + len(ids)], alone, atol=1e-4, rtol=1e-4)
            column += len(ids)


def test_a_step_draws_the_same_examples_again() -> None:
    tokenizer = train_tokenizer(TOPICS[:3], 500)
    options = BuildOptions(tokens_per_step=600)
    for step in range(4):
        one, other = (batch_of_step(step, options, TOPICS, tokenizer) for _ in range(2))
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_interrupted_build_ends_with_the_same_weights(tmp_path: Path) -> None:
    toy = [
        "--last-steps",
        "2",
        "--hidden",
        "32",
        "--layers",
        "1",
        "--tokens-per-step",
        "300",
        "--checkpoint-every",
        "2",
    ]
    main([*toy, "--steps", "5", "--output", str(tmp_path / "one"), "--checkpoint", str(tmp_path / "one.pt")])
    again = [
        *toy,
        "--steps",
        "5",
        "--output",
        str(tmp_path / "two"),
        "--checkpoint",
        str(tmp_path / "two.pt"),
    ]
    main([*again, "--stop-after", "3"])
    assert not (tmp_path / "two").exists()
    main(again)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    with pytest.raises(ValueError, match="of another build"):
        main([*again, "--seed", "1"])
