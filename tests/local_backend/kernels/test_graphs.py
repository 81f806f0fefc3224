"""Forwards of padded shapes, as CUDA graphs replay them, decode the same tokens."""

from __future__ import annotations

import pytest
import torch

from local_backend import Engine, SamplingParams
from local_backend.engine import engine
from tests.tiny import random_llama, tiny_tokenizer

PROMPTS = [[11, 12, 13, 14] * 5, [31, 32, 33], [41, 42, 43, 44, 45] * 9, [21] * 7, [51, 52, 53] * 4]


def _decoded(drafter: str, *, cuda_graphs: bool, device: str = "cpu") -> list[list[int]]:
    model = random_llama(max_position_embeddings=1024, eos_token_id=None).to(torch.device(device))
    params = [SamplingParams(max_tokens=count, temperature=0.0) for count in (30, 300, 50, 7, 64)]
    options = {"use_generation_config": False, "max_rows": 4, "max_prefix_bytes": 0}
    with Engine(model, tiny_tokenizer(), drafter, cuda_graphs=cuda_graphs, **options) as made:
        return [completion.token_ids for completion in made.generate(PROMPTS, params)]


@pytest.mark.parametrize("drafter", ["autoregressive", "jacobi", "lookahead", "combined"])
def test_padded_forwards_decode_the_same(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that end, begin and are prefilled meanwhile; more columns than one step."""
    monkeypatch.setattr(engine, "choose_graphs", lambda _, wanted: wanted)  # on a CPU nothing is recorded
    assert _decoded(drafter, cuda_graphs=True) == _decoded("autoregressive", cuda_graphs=False)


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="one GPU"):
        Engine(random_llama(), tiny_tokenizer(), cuda_graphs=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("drafter", ["autoregressive", "lookahead"])
def test_graphs_decode_the_same_on_a_gpu(drafter: str) -> None:
    graphed = _decoded(drafter, cuda_graphs=True, device="cuda")
    assert graphed == _decoded("autoregressive", cuda_graphs=False, device="cuda")
