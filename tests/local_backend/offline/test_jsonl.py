"""Lines of JSON end at line feeds alone, in the packages and in the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.copy_steps import load_cases
from benchmarks.length_prediction import write_log
from benchmarks.length_training import read_lengths
from benchmarks.router_training.labels import read_labels
from benchmarks.scheduling import GENERATED, SIBLINGS, read_answers
from benchmarks.sot_models import read
from benchmarks.trained_lengths import LengthLog
from benchmarks.workloads import questions
from local_backend import Engine
from local_backend.offline.jsonl import read_lines
from tests.tiny import tiny_chat_model, tiny_tokenizer

# What str.splitlines takes for ends of lines and JSON allows in a string.
TEXT = "a\u2028b\u2029c\u0085d"
BOM = b"\xef\xbb\xbf"


def _write(path: Path, *records: object) -> Path:
    lines = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    path.write_bytes(BOM + b"\r\n".join(lines))
    return path


@given(texts=st.lists(st.text(max_size=8), max_size=6), end=st.sampled_from([b"\n", b"\r\n", b"\n\n"]))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], end: bytes
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(BOM + end.join(json.dumps(text, ensure_ascii=False).encode() for text in texts))
    assert [line.record() for line in read_lines(path)] == texts


def test_a_damaged_line_is_named_and_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"1\n" + b'"\xff"\n' + b"[" * 100_000 + b"\n" + BOM + b"\n" + BOM + b"2\n" + "\u00e9".encode("utf-16")
    )
    lines = list(read_lines(path))
    assert [line.number for line in lines] == [1, 2, 3, 5, 6]
    assert (lines[0].record(), lines[3].record()) == (1, 2)
    for line in (lines[1], lines[2], lines[4]):
        with pytest.raises(ValueError, match=rf"line {line.number} of .*a\.jsonl is not JSON"):
            line.record()


def test_everything_that_reads_lines_of_json_reads_such_a_file(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    path = _write(tmp_path / "a.jsonl", {"question": TEXT}, {"question": TEXT, "category": TEXT})
    assert questions(5, path) == [TEXT, TEXT]
    assert [one["question"] for one in read(path, None)] == [TEXT, TEXT]
    (label,) = read_labels([_write(path, {"question": TEXT, "use_sot": 1})])
    assert label.question == TEXT
    (case,) = load_cases(_write(path, {"query": TEXT, "documents": [TEXT], "target": "a"}), tokenizer.encode)
    assert tokenizer.decode(list(case.references[0])) == TEXT
    lengths = {GENERATED: 3, **dict.fromkeys(SIBLINGS, 4), "prompt": TEXT}
    assert read_answers(_write(path, lengths, lengths))[0] == [3, 3]
    (example,) = read_lengths(_write(path, {"prompt": TEXT, "num_tokens": 3}), tokenizer)
    assert tokenizer.decode(list(example.prompt_ids)) == TEXT


def test_a_log_goes_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    LengthLog(path).add([1, 2], 3, task=TEXT)
    with Engine(tiny_chat_model(), tiny_tokenizer()) as engine:
        whole = path.read_bytes()
        path.write_bytes(whole + '{"prompt_ids": [1], "task": "\u00e9'.encode()[:-1])
        write_log(engine, path, 1, temperature=0.0)
    assert path.read_bytes() == whole
