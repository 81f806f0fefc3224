"""Skeleton-of-Thought over HTTP: ``transformers serve`` hosts the default model, ``openai:`` asks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from local_backend.models.default_model import default_model_folder
from sot_chains import ProviderError, SkeletonOfThought
from tests.servers import free_port, transformers_serve

# The other servers of other people's that the fast tests ask, over the same wire, are aimock's.
pytestmark = pytest.mark.slow

WEIGHTS = default_model_folder(torch.float32)
QUESTION = "What helps against stress?"
VICUNA = Path(__file__).parents[2] / "shared" / "data" / "questions" / "vicuna80.jsonl"


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with transformers_serve(WEIGHTS, tmp_path_factory.mktemp("serve"), "--dtype", "float32") as url:
        yield url


async def test_it_answers_point_by_point_over_http(base_url: str) -> None:
    sot = SkeletonOfThought(f"openai:{WEIGHTS}", router="always", base_url=base_url, max_points=2)
    message = await sot.ainvoke(QUESTION, max_tokens=16)
    trace = message.response_metadata["sot"]
    assert trace["route"] == "sot", trace
    assert len(trace["points"]) == len(trace["skeleton"]) >= 2
    chunks = [chunk.text async for chunk in sot.astream(QUESTION, max_tokens=16)]
    assert "".join(chunks).startswith("1. **")


async def test_a_wrong_model_and_a_server_that_is_down_are_named(base_url: str) -> None:
    with pytest.raises(ProviderError, match="no-such-model"):
        await SkeletonOfThought("openai:no-such-model", router="always", base_url=base_url).ainvoke(
            "How do I sleep well?"
        )
    nobody = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(ProviderError, match=nobody):
        await SkeletonOfThought("openai:any", router="always", base_url=nobody, max_retries=0).ainvoke(
            "How do I sleep well?"
        )


async def test_every_sixteenth_vicuna_question_is_answered_over_http(base_url: str) -> None:
    if not VICUNA.exists():
        pytest.skip(f"the Vicuna questions are not part of the project, and {VICUNA} is not here")
    questions = [json.loads(line)["question"] for line in VICUNA.read_text("utf-8").splitlines()[::16]]
    sot = SkeletonOfThought(f"openai:{WEIGHTS}", router="always", base_url=base_url)
    async with asyncio.timeout(1800):
        messages = [await sot.ainvoke(question, max_tokens=32) for question in questions]
    assert len(messages) == len(questions)
    assert all(message.text.strip() for message in messages)
