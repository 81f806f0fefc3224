"""GGUF files of several architectures: what is written is what ``transformers`` writes from the same file."""

from __future__ import annotations

import json
import logging
import resource
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from local_backend import ChatLocal, Engine, SamplingParams
from local_backend.models.default_model import packaged_file
from local_backend.models.loading import load
from tests.tiny import tiny_tokenizer

_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _INNER = 2, 64, 4, 2, 128


def write_gguf(path: Path, architecture: str, *, template: bool = True) -> None:
    """A tiny model of random weights and :func:`tiny_tokenizer`, as llama.cpp's converter lays it out."""
    tokenizer = tiny_tokenizer()
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_block_count(_LAYERS)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(len(tokenizer))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if template:
        writer.add_chat_template(tokenizer.chat_template)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}", rng.normal(0, 0.3, shape).astype(np.float32))

    def add_ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    add("token_embd.weight", len(tokenizer), _WIDTH)
    add("output.weight", len(tokenizer), _WIDTH)
    add_ones("output_norm.weight", _WIDTH)
    kv_width = _WIDTH * _KV_HEADS // _HEADS
    for layer in range(_LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            add_ones(f"{block}.{norm}.weight", _WIDTH)
        add(f"{block}.attn_q.weight", _WIDTH, _WIDTH)
        add(f"{block}.attn_k.weight", kv_width, _WIDTH)
        add(f"{block}.attn_v.weight", kv_width, _WIDTH)
        add(f"{block}.attn_output.weight", _WIDTH, _WIDTH)
        add(f"{block}.ffn_gate.weight", _INNER, _WIDTH)
        add(f"{block}.ffn_up.weight", _INNER, _WIDTH)
        add(f"{block}.ffn_down.weight", _WIDTH, _INNER)
        if architecture == "qwen2":
            for part, size in (("q", _WIDTH), ("k", kv_width), ("v", kv_width)):
                writer.add_tensor(f"{block}.attn_{part}.bias", rng.normal(0, 0.3, size).astype(np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the converted copies, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "langchain-parallel-decoding" / "models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    return tmp_path / "tiny.gguf"


def folders(copies: Path) -> list[str]:
    return sorted(each.name for each in copies.iterdir() if each.is_dir())


def logits(path: Path, dtype: str = "float32") -> torch.Tensor:
    model, tokenizer = load(path, dtype=dtype)
    assert model.name_or_path == str(path)
    assert tokenizer.chat_template
    return model(torch.tensor([tokenizer.encode("How can I bake bread?")])).logits


def continued(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
    )
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_file_is_decoded_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    with ChatLocal.from_pretrained(path, dtype="float32", drafter="lookahead", max_tokens=20) as chat:
        engine = chat.engine
        prompts = [engine.tokenizer.encode(text) for text in ("How can I bake bread?", "Sleep", "1. Plan")]
        ours = engine.generate(prompts, SamplingParams(max_tokens=20))
        assert chat.model_name == "tiny.gguf"
        assert chat.invoke("How can I bake bread?").usage_metadata
    for prompt, completion in zip(prompts, ours, strict=True):
        assert completion.token_ids == continued(theirs, prompt, 20)


@pytest.mark.slow
def test_the_packaged_file_is_decoded_as_transformers_does() -> None:
    path = packaged_file()
    assert path is not None
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model, tokenizer = load(path, dtype=torch.float32)
    prompt = tokenizer.encode("The capital of France is")
    with Engine(model, tokenizer, "lookahead") as engine:
        (ours,) = engine.generate([prompt], SamplingParams(max_tokens=24))
    assert ours.token_ids == continued(theirs, prompt, 24)


def test_a_file_needs_no_suffix(tmp_path: Path) -> None:
    """Ollama keeps models as ``blobs/sha256-...``."""
    write_gguf(tmp_path / "tiny.gguf", "llama")
    blob = tmp_path / "sha256-0123"
    shutil.copy(tmp_path / "tiny.gguf", blob)
    assert load(blob, dtype="float32")[0].config.model_type == "llama"


def test_a_model_of_a_file_can_be_saved(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    model, tokenizer = load(tmp_path / "tiny.gguf", dtype="float32")
    assert "quantization_config" not in model.config.to_dict()
    assert model.name_or_path == str(tmp_path / "tiny.gguf")
    assert tokenizer.chat_template


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_copy_has_the_tokenizer_of_the_file(architecture: str, tmp_path: Path) -> None:
    """Also where the architecture's own class would normalize texts, as Qwen's does."""
    write_gguf(tmp_path / "tiny.gguf", architecture)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for _ in range(2):
        _, tokenizer = load(tmp_path / "tiny.gguf", dtype="float32")
        assert tokenizer.backend_tokenizer.to_str() == read.backend_tokenizer.to_str()
        assert tokenizer.special_tokens_map == read.special_tokens_map
        assert tokenizer.chat_template == read.chat_template


def test_a_file_is_converted_once_for_each_content_and_dtype(
    file: Path, copies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    first = logits(file)
    assert "converting" in caplog.text
    assert str(copies) in caplog.text
    caplog.clear()
    assert torch.equal(logits(file), first)
    moved = shutil.copy(file, file.with_name("moved.gguf"))  # another time and path, but the same content
    moved.rename(elsewhere := copies.parent / "tiny.gguf")
    assert torch.equal(logits(elsewhere), first)
    assert not caplog.records
    ids = load(file, dtype="float32")[1].encode("How can I bake bread?")
    assert torch.equal(theirs(torch.tensor([ids])).logits, first)
    assert len(folders(copies)) == 1
    assert logits(file, "bfloat16").dtype == torch.bfloat16
    assert len(folders(copies)) == 2
    with file.open("r+b") as opened:  # the last weight
        opened.seek(-4, 2)
        opened.write(np.float32(9.0).tobytes())
    assert not torch.equal(logits(file), first)
    assert len(folders(copies)) == 3


def test_options_hold_for_a_copy(file: Path) -> None:
    for _ in range(2):
        model, _ = load(file, dtype="float32", model_options={"attn_implementation": "eager"})
        assert model.config._attn_implementation == "eager"
    assert load(file, dtype="float32")[0].config._attn_implementation == "sdpa"


def test_a_conversion_that_was_killed_or_damaged_is_made_again(
    file: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(PreTrainedTokenizerBase, "save_pretrained", fails)
        with pytest.raises(KeyboardInterrupt):
            load(file, dtype="float32")
    assert not folders(copies)
    first = logits(file)
    (name,) = folders(copies)
    weights = copies / name / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (rest := copies / f"{name}.unfinished").mkdir()  # as SIGKILL leaves it
    (rest / "model.safetensors").write_bytes(b"half")
    assert torch.equal(logits(file), first)
    assert folders(copies) == [name]


def test_a_file_is_loaded_without_a_place_for_its_copy(
    file: Path, copies: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # writing fails, as on a full disk
    try:
        full = logits(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot save" in caplog.text
    assert not folders(copies)
    with monkeypatch.context() as during:
        (file.parent / "no-folder").write_text("a file")
        during.setenv("XDG_CACHE_HOME", str(file.parent / "no-folder"))
        assert torch.equal(logits(file), full)
        eager, _ = load(file, dtype="float32", model_options={"attn_implementation": "eager"})
        assert eager.config._attn_implementation == "eager"
    assert torch.equal(logits(file), full)
    assert len(folders(copies)) == 1


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf does not exist"):
        ChatLocal.from_pretrained(tmp_path / "none.gguf")
    write_gguf(tmp_path / "odd.gguf", "an-architecture-of-tomorrow")
    with pytest.raises(ValueError, match=r"cannot read .*odd\.gguf.*an-architecture-of-tomorrow"):
        ChatLocal.from_pretrained(tmp_path / "odd.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "odd.gguf").read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"cannot read .*cut\.gguf"):
        ChatLocal.from_pretrained(tmp_path / "cut.gguf")
    write_gguf(tmp_path / "mute.gguf", "llama", template=False)
    with pytest.raises(ValueError, match="no chat template"):
        ChatLocal.from_pretrained(tmp_path / "mute.gguf", dtype="float32")
