"""What is read from the messages of LangChain's chat models."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.runnables import RunnableGenerator

from sot_chains.providers.langchain import LangChainProvider


def usage(num_in: int, num_out: int, cached: int = 0) -> UsageMetadata:
    details = InputTokenDetails(cache_read=cached)
    return UsageMetadata(
        input_tokens=num_in,
        output_tokens=num_out,
        total_tokens=num_in + num_out,
        input_token_details=details,
    )


async def deltas(*chunks: AIMessageChunk) -> list[Any]:
    async def answer(inputs: AsyncIterator[Any]) -> AsyncIterator[AIMessageChunk]:
        async for _ in inputs:
            pass
        for chunk in chunks:
            yield chunk

    provider = LangChainProvider(RunnableGenerator(answer))
    return [delta async for delta in provider.stream([], config={})]


@pytest.mark.parametrize(
    ("reported", "counted"),
    [
        ([usage(20, 0, 5), None, usage(0, 3), usage(0, 4)], (20, 7, 5)),  # to be added: Anthropic, Google
        ([usage(20, 1, 5), usage(20, 2, 5), usage(20, 4, 5), usage(20, 4, 5)], (20, 4, 5)),  # running totals
        ([None, usage(20, 4, 5)], (20, 4, 5)),
        ([usage(0, 2), usage(0, 3)], (0, 5, 0)),
        ([None], None),
    ],
)
async def test_counts(reported: list[UsageMetadata | None], counted: tuple[int, int, int] | None) -> None:
    received = await deltas(*(AIMessageChunk("a", usage_metadata=one) for one in reported))
    usages = [delta.usage for delta in received if delta.usage]
    assert len(usages) == (counted is not None)
    for one in usages:
        details = one["input_token_details"]
        assert (one["input_tokens"], one["output_tokens"], details["cache_read"]) == counted
        assert one["total_tokens"] == one["input_tokens"] + one["output_tokens"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"finish_reason": "length"},
        {"stop_reason": "length"},
        {"done_reason": "length"},
        {"status": "incomplete", "incomplete_details": {"reason": "length"}},
    ],
)
async def test_why_a_reply_ended(metadata: dict[str, Any]) -> None:
    assert (await deltas(AIMessageChunk("a", response_metadata=metadata)))[0].finish_reason == "length"
