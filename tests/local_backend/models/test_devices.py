"""A GPU is used where there is one, and a machine without one is as before; a lack of memory is explained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from local_backend import Engine, SamplingParams
from local_backend.caching.cache_layer import explained
from local_backend.kernels.graphs import Execution
from local_backend.models.loading import bf16_is_fast, choose_device, load
from tests.tiny import random_llama, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_llama().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that computes bfloat16, and where models were moved."""
    moved: list[str] = []

    def to(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
        moved.append(str(device))
        return model

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(PreTrainedModel, "to", to)
    return moved


def test_a_gpu_is_used_where_there_is_one(folder: Path, moves: list[str]) -> None:
    assert choose_device() == torch.device("cuda")
    model, _ = load(folder)
    assert moves == ["cuda"]
    assert model.dtype == torch.bfloat16
    for given in ({"device": "cpu", "dtype": "bfloat16"}, {"quantization": "int4", "dtype": "bfloat16"}):
        load(folder, **given)  # type: ignore[arg-type]  # some of its arguments
        assert moves.pop() == "cpu"
    load(folder, model_options={"device_map": "cpu"})
    assert moves == ["cuda"]  # the map says where


def test_layers_are_compiled_and_graphs_recorded_on_one_gpu() -> None:
    def model(*devices: str) -> Any:
        return SimpleNamespace(
            parameters=lambda: [SimpleNamespace(device=torch.device(one)) for one in devices]
        )

    assert Execution.of(model("cuda:0", "cuda:0"), None) == Execution(with_graphs=True, is_compiled=True)
    assert Execution.of(model("cuda:0", "cuda:0"), False) == Execution()
    for devices in (["cpu"], ["cuda:0", "cuda:1"], ["mps:0"]):
        assert Execution.of(model(*devices), None) == Execution()
        assert Execution.of(model(*devices), True) == Execution(is_compiled=True)


def test_apples_gpu_is_used_in_a_format_that_every_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("mps")
    assert not bf16_is_fast(choose_device())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_cpu_computes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_device() == choose_device(None) == choose_device("cpu") == torch.device("cpu")
    model, tokenizer = load(folder)
    assert model.device.type == "cpu"
    assert model.dtype == (torch.bfloat16 if bf16_is_fast("cpu") else torch.float32)
    with caplog.at_level("INFO", "local_backend"), Engine(model, tokenizer) as engine:
        engine.generate([[5, 6]], SamplingParams(max_tokens=2))
    said = [record.getMessage() for record in caplog.records if "runs on" in record.getMessage()]
    assert said == [f"LlamaForCausalLM runs on cpu in {model.dtype}, not compiled, without CUDA graphs"]


def test_a_lack_of_memory_says_what_for_and_an_engine_goes_on(model: LlamaForCausalLM) -> None:
    """The rows of the step fail, later ones are decoded."""
    with Engine(model, tiny_tokenizer(), use_generation_config=False) as engine:
        (want,) = engine.generate([[5, 6]], SamplingParams(max_tokens=9))
        fails = iter([torch.OutOfMemoryError("tried to allocate 9 GiB")])
        cache = engine._cache
        lay_out = cache.row_layers[-1].lay_out

        def lay_out_or_fail(lengths: Any) -> int:
            for error in fails:
                raise error
            return lay_out(lengths)

        cache.row_layers[-1].lay_out = lay_out_or_fail  # type: ignore[method-assign]  # some layers have grown
        with pytest.raises(torch.OutOfMemoryError, match=r"GiB of keys and values, 8 rows .* lower max_rows"):
            engine.generate([[7] * 20] * 5, SamplingParams(max_tokens=40))
        (again,) = engine.generate([[5, 6]], SamplingParams(max_tokens=9))
        assert again.token_ids == want.token_ids
        more = engine.generate([[7] * 20] * 5, SamplingParams(max_tokens=20, ignore_end=True))
        assert len({tuple(one.token_ids) for one in more}) == 1


def test_only_a_lack_of_memory_is_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    told = explained(caught.value, "a test: lower it")
    assert isinstance(told, torch.OutOfMemoryError)
    assert "not enough memory for a test: lower it" in str(told)
    assert explained(told, "another") is told
    other = RuntimeError("something else")
    assert explained(other, "a test") is other
