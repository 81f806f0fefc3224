"""``sot eval`` from questions to report, also after it was killed."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from langchain_core.messages import BaseMessage

from langchain_parallel_decoding.command import main
from sot_chains.evaluation import (
    Evaluation,
    Judge,
    Question,
    Store,
    evaluate,
    markdown,
    read_questions,
    write,
)
from sot_chains.router import RulesRouter
from tests.sot_chains.evaluation.judges import leans_to_the_first, prefers_longer
from tests.sot_chains.fakes import QUESTION, FakeProvider, PacedChatModel
from tests.sot_chains.server import MODEL, ChatServer, chat_server

ROOT = Path(__file__).parents[3]
QUESTIONS = [
    Question(QUESTION, "advice", "1"),
    Question("How do I wake up well?", "advice", "2"),
    Question("What is 7 * 6?", "sums", "3"),
    Question('Why <b>not</b> & "how"?', '<odd> | "category"', "4"),
]


async def _evaluation(folder: Path, *, fail: bool = False) -> Evaluation:
    def broken(messages: Sequence[BaseMessage]) -> bool:
        return fail and "wake" in str(messages[-1].text)

    with Store(folder / "store.jsonl") as store:
        judge = Judge(FakeProvider(answer=prefers_longer), store=store, label="long")
        model = PacedChatModel(fail=broken)
        return await evaluate(QUESTIONS, {"paced": model}, store=store, router=RulesRouter(), judge=judge)


def _rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "questions.csv").read_text("utf-8"))))


async def test_an_evaluation_compares_all_three_modes(tmp_path: Path) -> None:
    evaluation = await _evaluation(tmp_path)
    sot, sot_r = (evaluation.figures("paced", way) for way in ("sot", "sot_r"))
    assert sot.num_questions == sot_r.num_questions == len(QUESTIONS)
    assert (sot.num_sot, sot_r.num_sot) == (4, 3)  # the rules send the sum the plain way
    assert sot.net_win_rates["general"].net == 1.0  # its answers are longer
    assert (
        sot_r.net_win_rates["general"].net == 0.75
    )  # where it is the plain answer it neither wins nor loses
    assert set(sot.net_win_rates) == {
        "general",
        "coherence",
        "diversity",
        "immersion",
        "integrity",
        "relevance",
    }
    assert sot.num_points == 3
    assert sot.prefill_overhead == 4.0  # of one message a call
    assert evaluation.categories("paced") == ["advice", "sums", '<odd> | "category"']
    json.dumps(evaluation.summary())


async def test_an_answer_that_fails_is_counted_and_compared_with_nothing(tmp_path: Path) -> None:
    evaluation = await _evaluation(tmp_path, fail=True)
    assert evaluation.summary()["models"]["paced"]["num_failed"] == 1
    assert evaluation.figures("paced", "sot").num_questions == len(QUESTIONS) - 1
    rows = _rows(write(evaluation, tmp_path).parent)
    assert [bool(row["failed"]) for row in rows] == [False, True, False, False]
    # What failed is tried again by the next run; what did not is not.
    assert (await _evaluation(tmp_path)).summary()["models"]["paced"]["num_failed"] == 0


async def test_the_same_store_gives_the_same_report(tmp_path: Path) -> None:
    first, second = [markdown(await _evaluation(tmp_path)) for _ in range(2)]
    assert first == second


async def test_the_report_escapes_what_others_wrote(tmp_path: Path) -> None:
    report = markdown(await _evaluation(tmp_path))
    assert "<" not in report
    assert "&lt;odd&gt; &#124; &#34;category&#34;" in report
    tables = [part.splitlines() for part in report.split("\n\n") if part.startswith("|")]
    assert [len({line.count("|") for line in table}) for table in tables] == [1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no questions"),
        ("nonsense", "line 1"),
        ('{"q": 1}', "line 1"),
        ('{"question": "a"}\n{"question": " "}', "line 2"),
        ('nonsense\n{"question": "a"', "line 1"),
    ],
)
def test_a_question_file_of_another_form_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_questions(tmp_path / "questions.jsonl")


def test_lines_end_at_line_feeds_alone_and_damaged_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    texts = ["one\u2028line", "and\u0085this\x1ctoo\r"]
    good = [json.dumps({"question": text}, ensure_ascii=False).encode() for text in texts]
    emoji = json.dumps({"question": "half an emoji \ud83d"}).encode()
    lines = [b"\xef\xbb\xbf" + good[0], good[1], b"", emoji, b"\xef\xbb\xbf"]
    path.write_bytes(b"\r\n".join(lines))
    assert [question.text for question in read_questions(path)] == [*texts, "half an emoji \ufffd"]
    for damaged in (b'{"question": "a\xff"}', b'{"question": "cut', b"[" * 100_000):
        path.write_bytes(b"\n".join([*lines, damaged]))
        with pytest.raises(ValueError, match="line 6"):
            read_questions(path)


# --- the command


@pytest.fixture
def servers() -> Iterator[tuple[ChatServer, ChatServer]]:
    with chat_server() as answerer, chat_server() as judge:
        judge.answer = leans_to_the_first
        yield answerer, judge


def _arguments(folder: Path, answerer: ChatServer, judge: ChatServer) -> list[str]:
    questions = folder / "questions.jsonl"
    questions.write_text(
        "\n".join(json.dumps({"question": q.text, "category": q.category}) for q in QUESTIONS)
    )
    return [
        *("eval", str(questions), "--model", f"openai:{MODEL}", "--base-url", answerer.url),
        *("--judge", f"openai:{MODEL}", "--judge-base-url", judge.url, "--out", str(folder / "out")),
    ]


def test_the_command_writes_a_report_a_table_and_a_line(
    tmp_path: Path,
    servers: tuple[ChatServer, ChatServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-tests")
    assert main(_arguments(tmp_path, *servers)) == 0
    line = json.loads(capsys.readouterr().out)
    figures = line["models"][f"openai:{MODEL}"]
    assert figures["num_questions"] == len(QUESTIONS)
    assert figures["sot"]["net_win_rates"]["general"]["net"] > 0
    health = line["judge_health"]
    assert (health["num_judgements"], health["num_unreadable"], health["num_failed"]) == (
        12 * len(QUESTIONS),
        0,
        0,
    )
    rows = _rows(tmp_path / "out")
    assert [row["category"] for row in rows] == [question.category for question in QUESTIONS]
    assert all(float(row["sot_words"]) > 0 for row in rows)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == line
    assert "key-for-tests" not in "".join(p.read_text(errors="ignore") for p in (tmp_path / "out").iterdir())


def test_killed_and_taken_up_it_comes_to_the_same_report(
    tmp_path: Path, servers: tuple[ChatServer, ChatServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-tests")
    answerer, judge = servers
    judge.pause_seconds = 0.2
    command = [
        sys.executable,
        "-m",
        "langchain_parallel_decoding.command",
        *_arguments(tmp_path, answerer, judge),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    # The second question is being judged, eight calls at once.
    while len(judge.requests) < 20 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "report.md").exists()
    judge.pause_seconds = 0.0

    def finished() -> list[str]:
        assert main(command[3:]) == 0
        return [
            (tmp_path / "out" / name).read_text() for name in ("report.md", "questions.csv", "summary.json")
        ]

    first = finished()
    asked = [json.dumps(request, sort_keys=True) for request in answerer.requests]
    assert len(set(asked)) == len(asked)  # no answer was written twice
    num_judged = len({json.dumps(request, sort_keys=True) for request in judge.requests})
    assert num_judged == 12 * len(QUESTIONS)
    assert len(judge.requests) <= num_judged + 8  # what was judged when it was killed
    assert finished() == first
    assert len(answerer.requests) == len(asked)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limit", "0"], "--limit"),
        (["--model", "python:no.such.thing"], "No module named"),
        (["--model", "somebody:else"], "somebody"),
        (["--api-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["--judge", f"openai:{MODEL}", "--judge-timeout", "0"], "timeout"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-tests")
    (tmp_path / "q").write_text('{"question": "Why?"}')
    model = [] if "--model" in arguments else ["--model", "openai:x", "--base-url", "http://127.0.0.1:9/v1"]
    with pytest.raises(SystemExit) as stopped:
        main(["eval", str(tmp_path / "q"), "--out", str(tmp_path / "out"), *model, *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_function_of_the_users_can_be_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "q").write_text(json.dumps({"question": QUESTION}))
    arguments = ["eval", str(tmp_path / "q"), "--model", "python:tests.sot_chains.fakes.PacedChatModel"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--router", "none"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["judge"] is None
    assert list(figures["models"]["python:tests.sot_chains.fakes.PacedChatModel"]) == [
        "num_questions",
        "num_failed",
        "sot",
    ]
