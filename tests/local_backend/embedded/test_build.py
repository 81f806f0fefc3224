"""The build: what a step learns from, where it starts, and that an interruption changes nothing."""

from __future__ import annotations

import random
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.attention import PARTWISE
from local_backend.embedded.batches import (
    DECIDING_WEIGHT,
    NUM_DECIDING_TOKENS,
    NUM_DEPARTING_TOKENS,
    NUM_POINTED,
    collate,
    draw_batch,
    encode_example,
)
from local_backend.embedded.build import main, make_model, train
from local_backend.embedded.consistency import GuessedBatch, guessing_loss, with_guesses
from local_backend.embedded.corpus import Example, Turn, load_topics, request_table
from local_backend.embedded.decks import Decks
from local_backend.embedded.losses import only_quoted, pointing_loss
from local_backend.embedded.recipe import BuildOptions, lesson_at, rate_at
from local_backend.embedded.tasks import EDITS, KINDS, make_example
from local_backend.embedded.tokenization import guess_token_ids, token_traits, train_tokenizer

TOPICS = load_topics()
TINY = BuildOptions(
    hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, head_size=16, vocabulary_size=700
)
SCHEDULE = BuildOptions(
    num_steps=100,
    num_tuning_steps=4,
    num_first_steps=20,
    num_consistency_steps=0,
    num_last_steps=10,
    num_editing_steps=0,
    num_following_up_steps=0,
    warmup_steps=5,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TOPICS[:3], 700)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    model = make_model(TINY, tokenizer)
    model.eval()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_reads_what_is_sent_at_inference(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Prefix and branch together are the rendered prompt and the reply with its end."""
    example = make_example(kind, random.Random(kind), TOPICS[:3])
    encoded = encode_example(example, tokenizer)
    assert len(encoded.branches) == len(example.branches)
    for (request, start, rest), (ids, first_learned) in zip(example.branches, encoded.branches, strict=True):
        messages = [{"role": turn.role, "content": turn.content} for turn in example.turns]
        messages.append({"role": "user", "content": request})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        end = tokenizer.eos_token if example.ends else ""
        assert tokenizer.decode(encoded.prefix_ids + ids) == f"{prompt}{start}{rest}{end}"
        assert tokenizer.decode(ids[first_learned:]) == f"{rest}{end}"


def test_branches_of_an_example_are_what_a_row_reads_alone(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Packed behind one prefix, under the mask, every point gets the logits it gets by itself."""
    example = encode_example(make_example("expansion", random.Random(1), TOPICS[:3]), tokenizer)
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


def test_the_beginnings_of_points_weigh_more(tokenizer: PreTrainedTokenizerFast) -> None:
    """There it is decided what the rest is about."""
    topic = TOPICS[0]
    batch = collate(
        [encode_example(Example((), (("What now?", "", topic.answer),)), tokenizer)], tokenizer.pad_token_id
    )
    heavy = (batch["weights"][0] == DECIDING_WEIGHT) & (batch["targets"][0] != -100)
    begins = heavy & ~heavy.roll(1)
    assert int(begins.sum()) == len(topic.points)
    # One more where two line ends are two tokens.
    assert 0 <= int(heavy.sum()) - len(topic.points) * NUM_DECIDING_TOKENS < len(topic.points)
    for number, column in enumerate(begins.nonzero().flatten().tolist(), 1):
        said = tokenizer.decode(batch["targets"][0, column : column + NUM_DECIDING_TOKENS])
        assert said.lstrip().startswith(f"{number}. **{topic.points[number - 1].heading[:4]}")


def test_questions_are_put_together_from_a_topics_other_words() -> None:
    rng = random.Random(0)
    for topic in TOPICS:
        for _ in range(5):
            question = topic.drawn_question(rng)
            assert question[0].isupper() or not question[0].isalpha()
            assert "{" not in question
            assert any(words.lower() in question.lower() for words in (*topic.things, *topic.doings))
            assert question not in topic.held_out_questions
    with pytest.raises(ValueError, match=r"needs two things and two doings in phrasings\.toml"):
        replace(TOPICS[0], things=()).drawn_question(rng)


def test_edits_of_one_answer_share_what_stands_before_them() -> None:
    """Several requests behind one answer: each reply is what its own request makes of it."""
    num_branches, kinds = set(), set()
    asked = {
        kind: re.compile("|".join(re.sub(r"\\\{\w+\\\}", ".+", re.escape(request)) for request in requests))
        for kind, requests in request_table()["edit"].items()
        if kind in EDITS
    }
    for seed in range(60):
        example = make_example("edit", random.Random(seed), TOPICS)
        num_branches.add(len(example.branches))
        if not example.turns:
            continue
        answer = example.turns[-1].content
        for request, _, reply in example.branches:
            kind = next(kind for kind, pattern in asked.items() if pattern.fullmatch(request))
            kinds.add(kind)
            if kind == "add":
                assert reply.startswith(f"{answer}\n\n"), request
            elif kind == "shorter":
                assert answer.startswith(f"{reply}\n\n"), request
            else:
                assert set(reply.split()) - set(answer.split()), request
    assert num_branches == {1, 2, 3}
    assert kinds == set(EDITS)


def test_points_are_changed_without_replacing_words() -> None:
    """Where an answer has numbered points, every reply is its points: all and one more, or the first two."""
    for seed in range(40):
        example = make_example("points", random.Random(seed), TOPICS)
        if not example.turns or not (answer := example.turns[-1].content).startswith("1. **"):
            continue
        for _, _, reply in example.branches:
            assert answer.startswith(f"{reply}\n\n") or reply.startswith(f"{answer}\n\n")


def test_departures_from_a_copy_and_its_end_weigh_more(tokenizer: PreTrainedTokenizerFast) -> None:
    """So much that they are learned, among ten times as many tokens that are only copied."""
    text = (
        "When the long winter is over and the ice has gone the otter sleeps by the river. "
        "In the morning it looks for fish and shells."
    )
    changed = text.replace("river", "lantern")
    branches = (("Write it again.", "", text), ("Write lantern.", "", changed))
    first = len(tokenizer.encode(text.split(" river", maxsplit=1)[0], add_special_tokens=False))
    assert first > NUM_DECIDING_TOKENS  # which weigh more anyway
    num_copied = len(tokenizer.encode(text, add_special_tokens=False))

    def learned_of(copies: bool) -> tuple[list[int], list[float]]:
        example = Example((Turn("user", text),), branches, copies=copies)
        batch = collate([encode_example(example, tokenizer)], tokenizer.pad_token_id)
        learned = batch["targets"][0] != -100
        return batch["targets"][0][learned].tolist(), batch["weights"][0][learned].tolist()

    targets, weights = learned_of(copies=True)
    _, alike = learned_of(copies=False)
    assert set(alike[NUM_DECIDING_TOKENS:num_copied]) == {1.0}
    whole, weights, targets = weights[: num_copied + 1], weights[num_copied + 1 :], targets[num_copied + 1 :]
    assert set(whole[NUM_DECIDING_TOKENS:-1]) == {1.0}  # it does not depart
    assert whole[-1] == DECIDING_WEIGHT
    assert weights[first : first + NUM_DEPARTING_TOKENS] == [DECIDING_WEIGHT] * NUM_DEPARTING_TOKENS
    assert weights[-1] == DECIDING_WEIGHT
    assert 1.0 in weights[first + NUM_DEPARTING_TOKENS : -1]
    heavier = collate(
        [encode_example(Example((Turn("user", text),), branches, copies=True), tokenizer)],
        tokenizer.pad_token_id,
        departing_weight=16.0,
    )["weights"]
    assert int((heavier == 16.0).sum()) >= NUM_DEPARTING_TOKENS + 2
    assert tokenizer.decode(targets[first:]).startswith(" lantern")


def test_a_step_draws_the_same_examples_again(tokenizer: PreTrainedTokenizerFast) -> None:
    shares = dict.fromkeys(KINDS, 1.0)
    for step in range(4):
        (kind, one), (other_kind, other) = (
            draw_batch(f"0:{step}", shares, 600, Decks(TOPICS, "0"), tokenizer) for _ in range(2)
        )
        assert kind == other_kind
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_topic_is_taught_as_often_as_any_other(tokenizer: PreTrainedTokenizerFast) -> None:
    """Long ones, too, which are the first not to fit."""
    topics = TOPICS[:5]
    decks, num_taught = Decks(topics, "0"), Counter[str]()
    for step in range(40):
        state = decks.state()
        _, batch = draw_batch(f"0:{step}", {"plain": 1.0}, 1500, decks, tokenizer)
        assert batch["input_ids"].shape[0] == decks.state()["plain"] - state.get("plain", 0)
        for ids in batch["input_ids"]:
            text = tokenizer.decode(ids)
            num_taught.update(
                topic.name for topic in topics if topic.points[0].text in text.replace("\n", " ")
            )
    assert len(num_taught) == len(topics)
    assert max(num_taught.values()) - min(num_taught.values()) <= 1


def test_decks_go_on_from_their_state() -> None:
    def deal(decks: Decks, count: int) -> list[str]:
        names = []
        for _ in range(count):
            names.append(decks.top("plain").name)
            decks.take("plain")
        return names

    decks, other = Decks(TOPICS, "0"), Decks(TOPICS, "0")
    dealt = deal(decks, 70)
    assert sorted(dealt[: len(TOPICS)]) == sorted(topic.name for topic in TOPICS)
    assert dealt[: len(TOPICS)] != [topic.name for topic in TOPICS]
    deal(other, 30)
    again = Decks(TOPICS, "0")
    again.load(other.state())
    assert deal(again, 40) == dealt[30:]
    assert again.top("plain") == again.top("plain")  # it stays until it is taken


def test_a_quotation_is_found_where_it_stands(tokenizer: PreTrainedTokenizerFast) -> None:
    """The columns told are those of the sentence's tokens, in reply and document."""
    for seed in range(6):
        _, batch = draw_batch(f"places {seed}", {"questions": 1.0}, 2000, Decks(TOPICS, "0"), tokenizer)
        assert len(batch["quotations"]) > 3
        for row, said, taken, count in batch["quotations"].tolist():
            ids = batch["input_ids"][row]
            assert tokenizer.decode(ids[said - 2 : said + 1]).endswith(" say:")
            assert torch.equal(ids[said + 2 : said + 1 + count], ids[taken + 1 : taken + count])
            assert tokenizer.decode([ids[said + 1]]).strip() == tokenizer.decode([ids[taken]]).strip()
            assert torch.equal(batch["targets"][row, said : said + count], ids[said + 1 : said + 1 + count])
        quoted = only_quoted(batch)["targets"] != -100
        assert int(quoted.sum()) == int(batch["quotations"][:, 3].sum())


def test_pointing_costs_nothing_where_it_points_rightly() -> None:
    """And the more, the less it attends to the three tokens, or to nothing elsewhere."""
    targets = torch.full((1, 12), -100)
    targets[0, 6:11] = 7
    batch = {
        "targets": targets,
        "quotations": torch.tensor([[0, 6, 2, 5]]),
        "is_nothing": torch.arange(12)[None] == 0,
    }
    attended = torch.zeros(1, 5, 12, 12)
    attended[..., 0] = 1.0
    for step in range(NUM_POINTED):
        attended[0, :, 6 + step] = torch.eye(12)[2 + step]
    assert abs(float(pointing_loss(attended, batch))) < 1e-2
    attended[0, 1, 6] = torch.eye(12)[5]  # the second head says nothing of the first token
    assert abs(float(pointing_loss(attended, batch))) < 1e-2
    attended[0, 1, 7] = torch.eye(12)[5]
    one = float(pointing_loss(attended, batch))
    attended[0, 0, 10] = torch.eye(12)[4]
    assert 0.5 < one < float(pointing_loss(attended, batch))


def test_the_untrained_model_finds_what_followed_before() -> None:
    """Two of its layers begin as an induction pair: in a repeated text what comes next is likely."""
    tokenizer = train_tokenizer(TOPICS, 2000)
    model = make_model(BuildOptions(vocabulary_size=2000), tokenizer).eval()
    once = torch.randint(300, 1900, (4, 48), generator=torch.Generator().manual_seed(0))
    nothing = torch.full((4, 1), token_traits(tokenizer, TOPICS).nothing[0])  # begins every prompt
    with torch.no_grad():
        logits = model(torch.cat([nothing, once, once], dim=1)).logits[:, 49:-1]  # [rows, 47, vocabulary]
    ranks = (logits > logits.gather(-1, once[:, 1:, None])).sum(-1)
    assert (ranks < 5).float().mean() > 0.5  # by chance 5 of 2000


@pytest.mark.parametrize("kind", ["plain", "expansion"])
def test_a_guess_token_learns_what_stands_further_on(
    kind: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read alone behind its text it says the same, and its target is the text's token so many places on."""
    # Where the processor has units for bfloat16, training rounds what is compared here.
    monkeypatch.setattr("local_backend.embedded.consistency.fast_precision", nullcontext)
    guess_ids = guess_token_ids(tokenizer, 3)
    example = encode_example(make_example(kind, random.Random(1), TOPICS[:3]), tokenizer)
    batch = with_guesses(collate([example], tokenizer.pad_token_id), guess_ids)
    width = batch.mask.shape[-1]
    num_learned = sum(len(ids) - first for ids, first in example.branches)
    num_branches = len(example.branches)
    assert int((batch.places > 0).sum()) == 3 * num_learned - (1 + 2 + 3) * num_branches
    rng, columns = random.Random(0), (batch.places[0] > 0).nonzero()[:, 0].tolist()
    with torch.no_grad():
        logits = model.lm_head(_hidden_of_guesses(model, batch))[0]
        for column in rng.sample(columns, 12):
            place = int(batch.places[0, column])
            text = batch.input_ids[0, :width][batch.mask[0, 0, column] == 0]
            alone = model(torch.tensor([[*text.tolist(), guess_ids[place - 1]]])).logits[0, -1]
            torch.testing.assert_close(logits[column], alone, atol=1e-4, rtol=1e-4)
            for ids, _ in example.branches:
                whole = [*example.prefix_ids, *ids]
                if whole[: len(text)] == text.tolist():
                    assert int(batch.targets[0, column]) == whole[len(text) + place]
                    break
            else:
                pytest.fail("the guess token sees what is no beginning of a branch")


def _hidden_of_guesses(model: LlamaForCausalLM, batch: GuessedBatch) -> torch.Tensor:
    hidden: list[torch.Tensor] = []
    hook = model.model.register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state))
    model.set_attn_implementation(PARTWISE)
    loss = guessing_loss(model, batch)
    model.set_attn_implementation("sdpa")
    hook.remove()
    assert loss.isfinite()
    return hidden[0]


def test_no_text_holds_a_guess_token(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = guess_token_ids(tokenizer, 13)
    assert len(set(ids)) == 13
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 97)]))
    assert not set(ids) & set(tokenizer.encode(every))


def test_the_learning_rate_rises_and_falls_and_once_more_for_the_last_steps() -> None:
    rates = [rate_at(step, SCHEDULE) for step in range(110)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[0] == rates[4] < rates[5]
    assert rates[10] == rates[23] == 1
    assert rates[24] == rates[40] == SCHEDULE.then_learning_rate_share
    assert rates[99] < 0.1 * rates[40]
    assert rates[99] < rates[100] == SCHEDULE.last_learning_rate_share > rates[109]


def test_the_consistency_stage_goes_on_at_the_plain_ones_rate_which_falls_in_it() -> None:
    options = replace(SCHEDULE, num_consistency_steps=50)
    rates = [rate_at(step, options) for step in range(160)]
    assert len(set(rates[24:120])) == 1
    assert rates[125] > rates[135] > rates[149] > 0
    assert rates[149] < 0.1 * rates[100]
    assert rates[149] < rates[150] == options.last_learning_rate_share > rates[159]


def test_stages_that_refine_warm_up_and_fall_by_themselves() -> None:
    options = replace(SCHEDULE, num_editing_steps=400, num_following_up_steps=300)
    before = [rate_at(step, SCHEDULE) for step in range(110)]
    rates = [rate_at(step, options) for step in range(810)]
    assert rates[:110] == before  # what goes before does not know of them
    for first, last, peak in (
        (110, 509, options.editing_learning_rate_share),
        (510, 809, options.following_up_learning_rate_share),
    ):
        assert rates[first - 1] < rates[first + 5] < max(rates[first : last + 1]) == peak
        assert 0 < rates[last] < 0.1 * peak


@pytest.mark.parametrize("num_consistency_steps", [0, 50])
def test_every_step_has_a_lesson_of_known_kinds(num_consistency_steps: int) -> None:
    options = replace(
        SCHEDULE, num_consistency_steps=num_consistency_steps, num_editing_steps=6, num_following_up_steps=6
    )
    lessons = [lesson_at(step, options) for step in range(options.num_steps_in_all)]
    for lesson in lessons:
        for shares in lesson.streams:
            assert shares.keys() <= set(KINDS)
            assert sum(shares.values()) == pytest.approx(1)
    assert not any(lesson.guessed_size for lesson in lessons[:100])
    assert any(lesson.guessed_size for lesson in lessons[100:]) == bool(num_consistency_steps)
    assert [bool(lesson.follow_ups_size) for lesson in lessons[-7:]] == [False] + 6 * [True]


def _toy(folder: Path, name: str) -> list[str]:
    options = {
        "steps": 4,
        "tuning-steps": 1,
        "first-steps": 2,
        "last-steps": 1,
        "editing-steps": 4,
        "following-up-steps": 4,
        "hidden": 40,
        "layers": 1,
        "tokens-per-batch": 300,
        "checkpoint-every": 2,
    }
    given = [part for option, value in options.items() for part in (f"--{option}", str(value))]
    return [*given, "--output", str(folder / name), "--checkpoint", str(folder / f"{name}.pt")]


def _weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_an_interrupted_build_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left off in any stage and run again; the tuned model differs from the plain one."""
    monkeypatch.setattr(
        "local_backend.embedded.build.write_card", lambda *_, **__: None
    )  # measures for a minute
    tuned, plain = ("--consistency-steps", "3"), ("--without-consistency",)
    main([*_toy(tmp_path, "one"), *tuned])
    again = [*_toy(tmp_path, "two"), *tuned]
    for step in (3, 7, 9, 11, 12, 13, 15):
        main([*again, "--stop-after", str(step)])
    assert not (tmp_path / "two").exists()
    main(again)
    assert _weights(tmp_path / "one") == _weights(tmp_path / "two")
    assert AutoConfig.from_pretrained(tmp_path / "two").guess_token_ids
    main([*_toy(tmp_path, "three"), *plain])
    assert _weights(tmp_path / "three") != _weights(tmp_path / "one")
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "three"), "guess_token_ids")
    with pytest.raises(ValueError, match="of another build"):
        main([*again, "--seed", "1"])
    with monkeypatch.context() as changed:  # what an example teaches, with the same tokens
        changed.setattr("local_backend.embedded.tasks.POINT_STYLES", ("{heading}: {text}", "{text}"))
        with pytest.raises(ValueError, match="of another build"):
            main(again)
    monkeypatch.setattr("local_backend.embedded.recipe._THEN", lesson_at(0, BuildOptions()))
    with pytest.raises(ValueError, match="of another build"):
        main(again)


def test_training_goes_down(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    options = replace(
        TINY,
        num_steps=40,
        num_tuning_steps=0,
        num_first_steps=0,
        num_consistency_steps=0,
        num_last_steps=0,
        num_editing_steps=0,
        num_following_up_steps=0,
        tokens_per_batch=400,
        warmup_steps=5,
    )
    model = make_model(options, tokenizer)
    steps = train(model, tokenizer, TOPICS[:1], options, tmp_path / "checkpoint.pt")
    means = [sum(losses.values()) / len(losses) for _, losses in steps]
    assert sum(means[-8:]) < 0.9 * sum(means[:8])
