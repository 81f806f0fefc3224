"""The offline command: every line answered once, in order, as the engine would, whatever happens."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from local_backend import ChatLocal, Engine, SamplingParams
from local_backend.batch import main
from local_backend.offline.batch import answer_lines
from local_backend.offline.jsonl import read_lines
from local_backend.offline.prompt_file import record_prompt
from tests.families import tokenizer_of
from tests.local_backend.offline.work import write_requests
from tests.tiny import tiny_chat_model, tiny_tokenizer

ROOT = Path(__file__).parents[3]


def _lines(path: Path) -> list[dict[str, Any]]:
    # By line feeds alone: what str.splitlines takes for ends of lines may stand in an answer.
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


@pytest.mark.parametrize(("num_rows", "num_kills"), [(100, 2), pytest.param(1500, 5, marks=pytest.mark.slow)])
def test_killed_several_times_it_writes_what_an_undisturbed_run_writes(
    tmp_path: Path, num_rows: int, num_kills: int
) -> None:
    script = str(Path(__file__).with_name("killed.py"))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(num_rows), str(num_kills)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("killed at") == num_kills
    undisturbed = (tmp_path / "undisturbed.jsonl").read_bytes()
    assert (tmp_path / "killed.jsonl").read_bytes() == undisturbed
    requests = [line for line in (tmp_path / "in.jsonl").read_text("utf-8").split("\n") if line]
    answers = _lines(tmp_path / "undisturbed.jsonl")
    assert [one["id"] for one in answers] == [json.loads(line)["id"] for line in requests]
    assert {"in.jsonl", "killed.jsonl", "undisturbed.jsonl"} == {path.name for path in tmp_path.iterdir()}


def test_the_command_answers_as_the_chat_model_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    tiny_chat_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    question = "How can I bake bread at home?"
    begun = [{"role": "user", "content": question}, {"role": "assistant", "content": "First"}]
    records: list[object] = [
        {"id": "a", "messages": [{"role": "user", "content": question}]},
        {"messages": begun, "max_tokens": 5},
        {"prompt": "Bread is", "note": "keys that are not known are not read"},
        {"id": "b", "messages": [{"role": "user", "content": question}], "temperature": 0.9, "seed": 3},
        {"id": "c"},
        {"id": "d", "prompt": "Bread is", "references": "one text"},
        ["no object"],
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = "\n\n".join(map(json.dumps, records)) + "\nnot JSON"
    source.write_text(text, "utf-8")
    # In bfloat16 rows that are decoded together may answer otherwise than alone.
    options = ["--model", str(model), "--dtype", "float32", "--max-tokens", "12", "--no-progress"]
    main([str(source), str(output), *options])
    answers = _lines(output)
    assert [one["line"] for one in answers] == [1, 3, 5, 7, 9, 11, 13, 14]
    assert [one.get("id") for one in answers] == ["a", None, None, "b", "c", "d", None, None]
    assert "8 rows, 4 of them not answered" in capsys.readouterr().err
    with ChatLocal.from_pretrained(model, dtype="float32", max_tokens=12) as chat:
        assert answers[0]["text"] == chat.invoke(question).text
        assert (
            answers[1]["text"]
            == chat.invoke([*map(tuple, [("user", question), ("ai", "First")])], max_tokens=5).text
        )
        assert answers[3]["text"] == chat.invoke(question, temperature=0.9, seed=3).text
        continued = chat.engine.generate([chat.get_token_ids("Bread is")], SamplingParams(max_tokens=12))[0]
    assert answers[2]["text"] == continued.text
    assert answers[2]["num_tokens"] == len(continued.token_ids)
    errors = [one["error"] for one in answers[4:]]
    for error, words in zip(
        errors, ["no prompt (it has: id)", "a list of texts", "a JSON object", "JSON"], strict=True
    ):
        assert words in error


def test_a_damaged_line_gets_an_error_and_the_others_their_answers(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    good = '{"id": "a\u2028b\u0085c", "prompt": "Bread\u2028is"}'.encode()
    lines = [
        b"\xef\xbb\xbf" + good,
        b'{"id": "b", "prompt": "a\xff"}',
        b"\xef\xbb\xbf",
        good,
        b'{"prompt": "cut',
    ]
    source.write_bytes(
        b"\r\n".join([*lines, b"[" * 100_000, b'{"prompt": "half \\ud83d", "references": ["\\ud83d"]}'])
    )
    with Engine(tiny_chat_model(), tiny_tokenizer()) as engine:
        records = [
            record for _, record in answer_lines(engine, read_lines(source), SamplingParams(max_tokens=4))
        ]
    answers = sorted(records, key=lambda record: int(record["line"]))
    assert [one["line"] for one in answers] == [1, 2, 4, 5, 6, 7]
    assert [one.get("id") for one in answers] == [
        "a\u2028b\u0085c",
        None,
        "a\u2028b\u0085c",
        None,
        None,
        None,
    ]
    assert ["text" in one for one in answers] == [True, False, True, False, False, True]
    for index in (1, 3, 4):
        assert f"line {answers[index]['line']} of {source} is not JSON" in answers[index]["error"]
    assert answers[0]["text"] == answers[2]["text"]


def test_what_the_user_got_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 3)
    output.write_text('{"answers": "of somebody else"}\n', "utf-8")
    for arguments, words in (
        ([tmp_path / "none.jsonl", output], "none.jsonl does not exist"),
        ([source, source], "is the input"),
        ([source, output], "exists and is not an interrupted run"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments), "--no-progress"])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    assert output.read_text("utf-8") == '{"answers": "of somebody else"}\n'


def test_a_home_folder_a_long_line_and_a_terminal_without_unicode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "caf\u00e9"
    model = home / "model"
    tiny_chat_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    records = [
        {"question": "Hi", "id": "\ud83d"},
        {"question": "bread " * 3000},
        {"prompt": "\ud83d", "stop": "\ud83d"},
    ]
    (home / "in.jsonl").write_text("\n".join(map(json.dumps, records)), "utf-8")
    options = ["--model=~/model", "--dtype=float32", "--max-tokens=2", "--no-progress"]
    monkeypatch.setenv("HOME", str(home))
    shown = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, shown)
    main(["~/in.jsonl", "~/out.jsonl", *options])
    assert "3 rows, 1 of them not answered" in shown.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]  # of BytesIO
    first, second, third = _lines(home / "out.jsonl")
    assert first["text"]
    assert "ContextLengthError" in second["error"]
    assert "positions for 2048" in second["error"]
    assert third["text"]


def test_a_text_begins_with_the_token_that_begins_texts_once() -> None:
    tokenizer = tokenizer_of("llama_3")
    plain, _ = record_prompt({"prompt": "Bread is"}, tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<|begin_of_text|>"})
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    for text in ("Bread is", "<|begin_of_text|>Bread is"):
        assert record_prompt({"prompt": text}, tokenizer) == ([begin, *plain], 0)
    chat, _ = record_prompt({"question": "Bread?"}, tokenizer)
    assert chat.count(begin) == 1
