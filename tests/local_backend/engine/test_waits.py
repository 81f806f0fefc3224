"""A step reads the device once, whatever its rows ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from local_backend import Engine, SamplingParams
from local_backend.engine import choosing, decode_loop
from local_backend.sequences import sampling
from tests.tiny import random_llama, tiny_tokenizer

_READING = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}
PROMPTS = [[11, 12, 13, 14] * 5, [31, 32, 33], [41, 42, 43, 44, 45] * 9, [21] * 7]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_tokens=12, temperature=0.0, presence_penalty=0.5, min_tokens=8),
    SamplingParams(max_tokens=12, temperature=1.1, top_k=5, min_p=0.05, frequency_penalty=0.2),
]


class OnDevice(torch.Tensor):
    """A tensor that counts what would wait for a device: the host reading its values, or those made of it."""

    num_reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        OnDevice.num_reads += getattr(func, "__name__", "") in _READING
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("drafter", ["autoregressive", "jacobi", "reference_copy"])
@pytest.mark.parametrize(
    "params", [PARAMS, PARAMS[:1] * 4, PARAMS[1:2] * 4], ids=["mixed", "greedy", "drawn"]
)
def test_a_step_reads_the_device_once(
    drafter: str, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a device: a CPU has faster ways, which read what they compute.
    monkeypatch.setattr(choosing, "most_likely", lambda logits: logits.argmax(-1))
    monkeypatch.setattr(sampling, "_READ_AT_ONCE", ())
    choose_ahead = choosing.choose_tokens
    monkeypatch.setattr(decode_loop, "choose_tokens", lambda *given, ahead: choose_ahead(*given, ahead=True))
    with Engine(random_llama(eos_token_id=None), tiny_tokenizer(), drafter, max_rows=4) as engine:
        forward = engine._loop.forward

        def on_device(*args: Any, **options: Any) -> Any:
            logits = forward(*args, **options)
            return None if logits is None else logits.as_subclass(OnDevice)  # type: ignore[arg-type]  # it is one

        engine._loop.forward = on_device  # type: ignore[assignment]  # is only called
        OnDevice.num_reads = 0
        engine.generate(PROMPTS, params)
        assert engine.stats.num_forwards > 2
        assert OnDevice.num_reads == engine.stats.num_forwards
