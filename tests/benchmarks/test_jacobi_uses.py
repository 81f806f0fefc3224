"""The three uses hold their held-out part apart and score what answers say; adapters leave clean text."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.jacobi_adapters import GatedForward, add_adapters
from benchmarks.jacobi_tasks import TASKS, draw_cases
from benchmarks.jacobi_tasks.plain import PlainOptions, make_model, train_tokenizer
from benchmarks.jacobi_tasks.text_to_sql import schemas
from benchmarks.jacobi_tuning import main, replay
from benchmarks.jacobi_uses import USES, Use, part_of
from local_backend import Engine, SamplingParams
from local_backend.training import NoiseOptions, Training, TuneOptions
from local_backend.training.checkpoints import write_model
from local_backend.training.packing import Text, Texts, pack
from local_backend.training.streams import Streams
from local_backend.training.trainer import answer_tokens
from tests.tiny import tiny_chat_model, tiny_tokenizer


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_held_out_requests_share_no_names_wordings_or_tables(use: Use) -> None:
    learned, held_out = use.some("train", 300), use.some("held_out", 100)
    assert [one.source for one in use.some("train", 3)] == [one.source for one in learned[:3]]
    assert not {one.source for one in learned} & {one.source for one in held_out}
    assert not {one.answer for one in learned} & {one.answer for one in held_out}
    kinds = {"json": r"(?<=customer\": \")[^\"]+|(?<=city\": \")[^\"]+", "sql": r"(?<=FROM )\w+"}
    if pattern := kinds.get(use.name):
        names = [
            set(re.findall(pattern, " ".join(one.answer for one in some))) for some in (learned, held_out)
        ]
        assert all(names)
        assert not names[0] & names[1]
    else:
        # Without what is filled in, no held-out sentence or question is among those that are learned.
        wordings = [
            {
                re.sub(r"[A-Z]\w+ [A-Z]\w+|[\d,]+", "_", sentence)
                for one in some
                for sentence in re.split(r"(?<=[.?]) |\n\n|: ", one.source)[1:]
            }
            for some in (learned, held_out)
        ]
        assert wordings[0] & wordings[1] <= {"Quote the sentence that answers the question"}


def test_a_split_draws_from_its_part_alone() -> None:
    pool = list(range(12))
    assert part_of(pool, "held_out") == [3, 7, 11]
    assert sorted(part_of(pool, "train") + part_of(pool, "held_out")) == pool
    tables = [
        {table.name for one in schemas(split) for table in (one.first, one.second)}
        for split in ("train", "test")
    ]
    assert not tables[0] & tables[1]


def test_answers_are_scored_by_what_they_say() -> None:
    for use in USES.values():
        for request in use.some("held_out", 8):
            assert use.score(request, request.answer) == 1
            assert use.score(request, "I cannot say.") == 0
    sql = USES["sql"]
    request = next(one for one in sql.draw("train") if "COUNT(*) FROM" in one.answer)
    assert sql.score(request, request.answer.replace("COUNT(*)", "count(id)")) == 1
    assert sql.score(request, request.answer.replace("COUNT(*)", "MAX(id)")) == 0
    assert (
        sql.score(request, "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT * FROM n") == 0
    )
    record = USES["json"].some("train", 1)[0]
    assert USES["json"].score(record, record.answer.replace('"day": "', '"day": "no ')) == pytest.approx(
        5 / 6
    )


@pytest.fixture
def texts() -> list[Text]:
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13]]
    with Engine(tiny_chat_model(), tiny_tokenizer()) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0))
    return [(prompt, one.token_ids) for prompt, one in zip(prompts, completions, strict=True)]


def test_adapters_at_guesses_change_guesses_alone(texts: list[Text]) -> None:
    model = deepcopy(tiny_chat_model())
    laid_out, rows = Texts.of(texts), torch.arange(2)
    streams = Streams(laid_out, NoiseOptions(4, 2))
    group = laid_out.groups[-1]._replace(first=0)
    batch = pack(laid_out, rows, group, streams.copies(rows, torch.Generator().manual_seed(0)))
    gate = add_adapters(model, 2)
    forward = GatedForward(model, gate)
    with torch.no_grad():
        before = forward.hidden(batch)
        for name, value in model.named_parameters():
            if ".up." in name:
                value.normal_()
        after = forward.hidden(batch)
    assert torch.equal(before[~batch.is_guess], after[~batch.is_guess])
    assert not torch.allclose(before[batch.is_guess], after[batch.is_guess])
    assert {name.split(".")[-2] for name, value in model.named_parameters() if value.requires_grad} == {
        "up",
        "down",
    }


def test_a_replay_of_answers_learned_by_heart_lands_whole_blocks(texts: list[Text]) -> None:
    """The plain tiny model lands little; after many steps on two texts it lands blocks."""
    model = deepcopy(tiny_chat_model())
    options = TuneOptions(
        num_steps=120, batch_size=2, learning_rate=5e-3, ar_weight=1.0, num_likely=0, bf16=False,
        noise=NoiseOptions(4, 4),
    )  # fmt: skip
    laid_out = Texts.of(texts)
    training = Training(model.requires_grad_(True), model, laid_out, answer_tokens(laid_out), options)
    before = replay(training, texts, 4)
    for _ in range(options.num_steps):
        training.step()
    model.eval()
    assert replay(training, texts, 4) > max(2.0, before)


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("ablation", ["plain", "recipe", "no teacher", "no streams", "AR weight 1", "ended answers alone"]),
        ("lossless", ["plain", "adapters at guesses"]),
    ],
)
def test_every_variant_has_its_figures(
    command: str, rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = list(islice(draw_cases(TASKS["text_to_sql"], "train"), 50))
    shape = PlainOptions(hidden_size=32, num_layers=1, num_heads=2, vocabulary_size=320)
    tokenizer = train_tokenizer(cases, shape.vocabulary_size)
    write_model(make_model(shape, tokenizer), tokenizer, tmp_path / "plain")
    given = [
        "--uses",
        "text_to_sql",
        "--prompts",
        "6",
        "--cases",
        "2",
        "--steps",
        "1",
        "--batch-size",
        "2",
        "--rank",
        "2",
    ]
    folders = ["--model", str(tmp_path / "plain"), "--output", str(tmp_path / "work")]
    main([command, *given, *folders])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["uses"]["text_to_sql"]
    assert list(found) == rows
    assert all(row["tokens a forward"] >= 1 for row in found.values() if row.get("texts") != 0)
    if command == "lossless":
        assert found["adapters at guesses"]["perplexity"] == 1
