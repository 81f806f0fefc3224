"""``sot eval`` from questions to report, killed and taken up, and the report in a real browser."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from langchain_core.messages import BaseMessage

from langchain_parallel_decoding.command import main
from sot_chains.evaluation import Evaluation, Judge, Question, Store, evaluate, html, read_questions, write
from sot_chains.evaluation.figures import Bar, Dot, bars, scatter, stacked
from sot_chains.router import RulesRouter
from tests.sot_chains.evaluation.judges import leans_to_the_first, prefers_longer
from tests.sot_chains.fakes import QUESTION, PacedChatModel, ScriptedProvider
from tests.sot_chains.server import MODEL, ChatServer, chat_server

ROOT = Path(__file__).parents[3]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUESTIONS = [
    Question(QUESTION, "advice", "1"),
    Question("How do I wake up well?", "advice", "2"),
    Question("What is 7 * 6?", "sums", "3"),
    Question('Why <b>not</b> & "how"?', '<odd> & "category"', "4"),
]


async def _evaluation(folder: Path, *, fail: bool = False) -> Evaluation:
    def broken(messages: Sequence[BaseMessage]) -> bool:
        return fail and "wake" in str(messages[-1].text)

    with Store(folder / "store.sqlite") as store:
        judge = Judge(ScriptedProvider(prefers_longer), store=store, label="long")
        model = PacedChatModel(fail=broken)
        return await evaluate(
            QUESTIONS, {"paced": model}, store=store, router=RulesRouter(), judge=judge, judge_name="long"
        )


async def test_an_evaluation_compares_all_three_ways(tmp_path: Path) -> None:
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
    assert (sot.num_points, sot.words_per_point) == (3, pytest.approx(14 / 3))
    assert sot.prefill_overhead == 4.0  # of one message a call
    assert evaluation.categories("paced") == ["advice", "sums", '<odd> & "category"']
    json.dumps(evaluation.summary())


async def test_an_answer_that_fails_is_counted_and_compared_with_nothing(tmp_path: Path) -> None:
    evaluation = await _evaluation(tmp_path, fail=True)
    assert evaluation.summary()["models"]["paced"]["num_failed"] == 1
    assert evaluation.figures("paced", "sot").num_questions == len(QUESTIONS) - 1
    rows = list(csv.DictReader(io.StringIO(evaluation.csv())))
    assert [bool(row["failed"]) for row in rows] == [False, True, False, False]
    # What failed is tried again by the next run; what did not is not.
    assert (await _evaluation(tmp_path)).summary()["models"]["paced"]["num_failed"] == 0


async def test_the_same_store_gives_the_same_report(tmp_path: Path) -> None:
    first, second = [html(await _evaluation(tmp_path)) for _ in range(2)]
    assert first == second


async def test_the_report_escapes_what_others_wrote(tmp_path: Path) -> None:
    page = html(await _evaluation(tmp_path))
    assert "<b>not</b>" not in page
    assert "<odd>" not in page
    assert "&lt;b&gt;not&lt;/b&gt;" in page
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)


def test_figures_are_drawn_of_anything() -> None:
    for values in ([], [0.0], [1.0, 1.0], [-3.5, 1e-9, 12345.0]):
        assert scatter([Dot("a", v, v, 0) for v in values], ["x"], x_name="s", y_name="q").endswith("</svg>")
        assert bars([("a", [Bar(v, v - 1, v + 1), None]) for v in values], ["x", "y"], name="n").endswith(
            "</svg>"
        )
        assert stacked([("a", [abs(v), 0.0]) for v in values], ["x", "y"], name="n").endswith("</svg>")


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
    texts = ["one\u2028line", "and\u0085this\x1ctoo\r", "half an emoji \ud83d"]
    good = [
        json.dumps({"question": text}, ensure_ascii=False).encode("utf-8", "surrogatepass")
        for text in texts[:2]
    ]
    lines = [
        b"\xef\xbb\xbf" + good[0],
        b'{"question": "a\xff"}',
        good[1],
        b"",
        json.dumps({"question": texts[2]}).encode(),
    ]
    path.write_bytes(b"\r\n".join([*lines, b'{"question": "cut', b"[" * 100_000, b"\xef\xbb\xbf"]))
    questions = read_questions(path)
    assert [question.text for question in questions if not question.error] == [
        *texts[:2],
        "half an emoji \ufffd",
    ]
    assert [question.name for question in questions if question.error] == ["2", "6", "7"]
    assert all(
        f"line {question.name} is not JSON" in question.error for question in questions if question.error
    )


def test_a_damaged_line_gets_an_error_and_the_others_their_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "questions.jsonl", tmp_path / "out"
    path.write_bytes(
        b'{"question": "a\xff"}\n' + json.dumps({"question": QUESTION, "category": "advice"}).encode()
    )
    model = "python:tests.sot_chains.fakes.PacedChatModel"
    assert main(["eval", str(path), "--model", model, "--out", str(out), "--router", "rules"]) == 0
    captured = capsys.readouterr()
    assert "1 of 2 questions answered every way" in captured.err
    assert json.loads(captured.out)["models"][model]["num_failed"] == 1
    assert list(json.loads(captured.out)["models"][model]["sot"]["by_category"]) == ["advice"]
    damaged, answered = csv.DictReader(io.StringIO((out / "questions.csv").read_text("utf-8")))
    assert damaged["failed"].count("line 1 is not JSON in UTF-8") == 1
    assert answered["failed"] == ""
    assert int(answered["sot_words"]) > 0
    assert "line 1 is not JSON in UTF-8" in (out / "report.html").read_text("utf-8")


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
    assert line["judge_health"]["num_verdicts"] == 12 * len(QUESTIONS)
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "out" / "questions.csv").read_text())))) == len(
        QUESTIONS
    )
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == line
    assert "key-for-tests" not in "".join(p.read_text(errors="ignore") for p in (tmp_path / "out").iterdir())


def test_killed_and_taken_up_it_comes_to_the_same_report(
    tmp_path: Path, servers: tuple[ChatServer, ChatServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-tests")
    answerer, judge = servers
    judge.pause_seconds = 0.01
    command = [
        sys.executable,
        "-m",
        "langchain_parallel_decoding.command",
        *_arguments(tmp_path, answerer, judge),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(judge.requests) < 12 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "report.html").exists()
    num_answered, num_judged = len(answerer.requests), len(judge.requests)
    judge.pause_seconds = 0.0

    def finished() -> list[str]:
        assert main(command[3:]) == 0
        return [
            (tmp_path / "out" / name).read_text() for name in ("report.html", "questions.csv", "summary.json")
        ]

    first = finished()
    assert len(answerer.requests) == num_answered  # no answer was written twice
    assert len(judge.requests) < num_judged + 12 * len(QUESTIONS)
    assert finished() == first


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


# --- in a browser


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
async def test_in_a_browser_figures_show_tables_sort_and_nothing_is_fetched(tmp_path: Path) -> None:
    from playwright.async_api import async_playwright

    report = write(await _evaluation(tmp_path), tmp_path)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            asked: list[str] = []
            said: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            await page.goto(report.as_uri())
            boxes = [await figure.bounding_box() for figure in await page.locator("svg").all()]
            assert len(boxes) == 5
            assert all(box and box["width"] > 300 and box["height"] > 60 for box in boxes)
            assert await page.locator("svg path").count() > 30
            table = page.locator("table").last
            for head, is_number in (("plain, s", True), ("question", False)):
                button = table.locator("button", has_text=re.compile(f"^{head}$"))
                column = await button.evaluate("button => button.parentElement.cellIndex")
                for direction in ("ascending", "descending"):
                    await button.click()
                    cells = table.locator(f"tbody tr td:nth-child({column + 1})")
                    values = await cells.evaluate_all("cells => cells.map(cell => cell.dataset.value)")
                    keys = [float(value) for value in values] if is_number else values
                    assert len(keys) == len(QUESTIONS)
                    if is_number:
                        assert keys == sorted(keys, reverse=direction == "descending")
                    else:
                        order = await page.evaluate("v => [...v].sort((a, b) => a.localeCompare(b))", keys)
                        assert keys == (order if direction == "ascending" else order[::-1])
            assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
            assert said == []
        finally:
            await browser.close()
