"""What is read from the messages of LangChain's chat models."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.runnables import RunnableGenerator
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from sot_chains import Retries
from sot_chains.providers.base import find_ending
from sot_chains.providers.langchain import LangChainProvider, find_finish_reason
from tests.sot_chains.fakes import sot_of
from tests.sot_chains.providers.test_replies import Plainly
from tests.sot_chains.wire_server import chunk, events, json_reply, wire_server


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
        for one in chunks:
            yield one

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


async def test_half_a_stream_is_not_whole() -> None:
    half = events(chunk("Half an"), done=False)
    whole = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Whole."}}]}
    for reply, is_whole in ((half, False), (json_reply(whole), True)):
        async with wire_server(reply) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            options = {} if not is_whole else {"disable_streaming": True}
            model = ChatOpenAI(model="m", base_url=url, api_key=SecretStr("k"), max_retries=0, **options)
            sot = sot_of(model, router=Plainly(), retries=Retries(max_attempts=1))
            trace = (await sot.ainvoke("x")).response_metadata["sot"]
            assert trace["is_complete"] == is_whole
            await model.root_async_client.close()


@pytest.mark.parametrize(
    ("reason", "ending"),
    [
        *((None, "whole"), ("stop", "whole"), ("FinishReason.STOP", "whole"), ("end-turn", "whole")),
        *(("FINISH_REASON_MAX_TOKENS", "length"), ("FINISH_REASON_STOP", "whole"), ("eosFound", "whole")),
        *(("STOP_CRITERIA_MET", "whole"), ("COMPLETE", "whole"), ("normal", "whole"), ("tool_use", "calls")),
        *(("contextLengthReached", "length"), ("ERROR_LIMIT", "length"), ("max_output_tokens", "length")),
        *(("IMAGE_SAFETY", "filtered"), ("guardrail_intervened", "filtered"), ("ERROR_TOXIC", "filtered")),
        *(("FINISH_REASON_UNSPECIFIED", "failed"), ("timeout", "failed"), ("pause_turn", "failed")),
        *(("", "failed"), ("cancelled", "failed"), ("MALFORMED_FUNCTION_CALL", "failed"), ("load", "failed")),
    ],
)
def test_endings(reason: str | None, ending: str) -> None:
    assert find_ending(reason) == ending


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"stopReason": "max_tokens"}, "max_tokens"),
        ({"object": "response", "status": "failed"}, "failed"),
        ({"object": "response", "status": "completed", "incomplete_details": None}, "completed"),
        ({"status": "ok"}, None),
        ({"model_provider": "openai"}, "no finish reason"),
        ({"model_provider": "openai", "finish_reason": "stop"}, "stop"),
    ],
)
def test_reasons_of_other_apis(metadata: dict[str, Any], reason: str | None) -> None:
    assert find_finish_reason(metadata, is_streamed=True) == reason
