"""Forwards of padded shapes, as CUDA graphs replay them, decode the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from local_backend import Engine, SamplingParams
from local_backend.kernels.graphs import Execution, ForwardInputs, GraphedForwards
from local_backend.scheduling import memory
from tests.tiny import random_llama, tiny_tokenizer

PROMPTS = [[11, 12, 13, 14] * 5, [31, 32, 33], [41, 42, 43, 44, 45] * 9, [21] * 7, [51, 52, 53] * 4]


@functools.cache
def _decoded_plainly(device: str = "cpu") -> list[list[int]]:
    return _decoded("autoregressive", compiled=False, device=device)


def _decoded(drafter: str, *, compiled: bool | None, device: str = "cpu") -> list[list[int]]:
    model = random_llama(max_position_embeddings=1024, eos_token_id=None).to(torch.device(device))
    params = [SamplingParams(max_tokens=count, temperature=0.0) for count in (30, 150, 50, 7, 64)]
    options = {"use_generation_config": False, "max_rows": 4, "max_prefix_bytes": 0}
    with Engine(model, tiny_tokenizer(), drafter, compiled=compiled, **options) as made:
        return [completion.token_ids for completion in made.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("drafter", "free_bytes"),
    [
        *(("combined", free_bytes) for free_bytes in (None, 2**20, 2**26)),
        ("autoregressive", 2**20),
        *(
            pytest.param(drafter, free_bytes, marks=pytest.mark.slow)
            for drafter in ("autoregressive", "jacobi", "lookahead")
            for free_bytes in (None, 2**20, 2**26)
        ),
    ],
)
def test_padded_forwards_decode_the_same(
    drafter: str, free_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end, begin and are prefilled meanwhile; more columns than one step; with scarce memory."""
    plain = _decoded_plainly()
    monkeypatch.setattr(
        Execution, "of", lambda *_: Execution(with_graphs=True)
    )  # on a CPU nothing is recorded
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda _: free_bytes)
    assert _decoded(drafter, compiled=None) == plain


@pytest.mark.parametrize(("free_bytes", "is_enough"), [(2**22, True), (2**18, False)])
def test_graphs_live_as_long_as_the_engine(
    free_bytes: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers stay where they are, and in one shape if every row has room for all its positions."""
    monkeypatch.setattr(Execution, "of", lambda *_: Execution(with_graphs=True))
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda _: free_bytes)
    recorded: list[tuple[int, ...]] = []
    record = GraphedForwards._record

    def noted(self: GraphedForwards, given: ForwardInputs) -> Callable[[], Tensor]:
        recorded.append(self.cache.layout)
        return record(self, given)

    monkeypatch.setattr(GraphedForwards, "_record", noted)
    model = random_llama(max_position_embeddings=512, eos_token_id=None)
    with Engine(model, tiny_tokenizer(), max_rows=4, use_generation_config=False) as engine:
        engine.warm_up()
        num_warm = len(recorded)
        engine.generate(PROMPTS, SamplingParams(max_tokens=30, temperature=0.0))
        assert num_warm
        assert len(recorded) == num_warm or not is_enough
        engine.generate(PROMPTS[:2], SamplingParams(max_tokens=250, temperature=0.0))
    assert len({moves for moves, *_ in recorded}) == 1
    assert (len({(rows, columns) for _, rows, columns in recorded}) == 1) == is_enough


def test_on_a_cpu_nothing_is_compiled_or_recorded_unless_asked() -> None:
    assert Execution.of(random_llama(), None) == Execution()
    assert Execution.of(random_llama(), True) == Execution(with_graphs=False, is_compiled=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("drafter", ["autoregressive", "lookahead"])
def test_graphs_decode_the_same_on_a_gpu(drafter: str) -> None:
    graphed = _decoded(drafter, compiled=None, device="cuda")
    assert graphed == _decoded_plainly("cuda")
