"""The vendors' wires, spoken by aimock: what is asked, what is counted, what errors mean."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from sot_chains import ModelProfile, Price, ProviderError, Retries, SkeletonOfThought, close_clients
from sot_chains.providers import VendorProvider
from sot_chains.providers.anthropic import make_request
from tests.servers import Aimock, aimock
from tests.sot_chains.aimock_prompts import LABELS, MARKED, WHOLE
from tests.sot_chains.fakes import nothing_runs, sot_of

QUESTION = "What is there to say?"
WIRES = ["chat", "anthropic"]
NO_PAUSES = Retries(max_attempts=4, first_pause_seconds=0.0)


def sot_on(wire: str, server: Aimock, model: str = "m-1", **options: Any) -> SkeletonOfThought:
    """Skeleton-of-Thought on one of aimock's wires."""
    options = {"profile": ModelProfile(prompts=MARKED), "retries": NO_PAUSES, **options}
    if wire == "anthropic":
        return sot_of(f"anthropic:{model}", base_url=server.anthropic_url, **options)
    return sot_of(f"openai:{model}", base_url=server.openai_url, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Aimock]:
    with aimock() as running:
        yield running


@pytest.mark.parametrize("wire", WIRES)
async def test_an_answer(wire: str, server: Aimock) -> None:
    sot = sot_on(wire, server)
    before = server.stats()
    message = await sot.ainvoke([("system", "Be brief."), ("user", QUESTION)], temperature=0.5, max_tokens=99)
    assert message.text == WHOLE
    trace = message.response_metadata["sot"]
    assert trace["is_complete"]
    assert [point["finish_reason"] for point in trace["points"]] == [
        "end_turn" if wire == "anthropic" else "stop"
    ] * 3
    after = server.stats()
    assert trace["num_requests"] == after["requests"] - before["requests"] == 4
    reported = trace["cost"]["reported"]
    assert reported["input_tokens"] == after["input_tokens"] - before["input_tokens"]
    assert reported["output_tokens"] == after["output_tokens"] - before["output_tokens"]
    assert trace["cost"]["estimated"] is None
    assert message.usage_metadata is not None
    assert message.usage_metadata["input_tokens"] == reported["input_tokens"]
    assert "".join([chunk.text async for chunk in sot.astream(QUESTION)]) == WHOLE
    assert await nothing_runs()


@pytest.mark.parametrize("wire", WIRES)
def test_loops_come_and_go(wire: str, server: Aimock) -> None:
    sot = sot_on(wire, server)
    assert sot.invoke(QUESTION).text == WHOLE
    for _ in range(2):
        assert asyncio.run(sot.ainvoke(QUESTION)).text == WHOLE

    async def close_in_between() -> None:
        assert (await sot.ainvoke(QUESTION)).text == WHOLE
        await close_clients()
        assert (await sot.ainvoke(QUESTION)).text == WHOLE

    asyncio.run(close_in_between())
    gc.collect()  # what is left open would warn now, and warnings are errors


@pytest.mark.parametrize("wire", WIRES)
async def test_callbacks_and_secrets(wire: str, server: Aimock) -> None:
    sot = sot_on(wire, server, api_key="s3cret")
    usage = UsageMetadataCallbackHandler()
    message = await sot.ainvoke(QUESTION, {"callbacks": [usage]})
    assert usage.usage_metadata["m-1"]["total_tokens"] == message.usage_metadata["total_tokens"]  # type: ignore[index]  # it reports
    events = [event async for event in sot.astream_events(QUESTION, version="v2")]
    assert {e["name"] for e in events if e["event"] == "on_chat_model_end"} >= {"answer", "point_2"}
    assert "s3cret" not in str(events) + repr(sot.provider) + repr(vars(sot.provider)) + repr(sot.options)
    assert isinstance(sot.provider, VendorProvider)
    assert "s3cret" not in str(sot.provider.account)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("fault", ["429", "500", "529", "malformed", "disconnect", "cut"])
async def test_what_passes_is_tried_again(wire: str, fault: str) -> None:
    with aimock(faults={fault: 0.5}, seed=7) as server:
        sot = sot_on(wire, server, retries=Retries(max_attempts=12, first_pause_seconds=0.0))
        message = await sot.ainvoke(QUESTION)
        assert message.text == WHOLE
        trace, stats = message.response_metadata["sot"], server.stats()
        assert trace["is_complete"]
        assert stats["faults"][fault] > 0
        assert trace["num_requests"] == stats["requests"] > 4
        # To the token for what completed; what was cut is told apart.
        assert trace["cost"]["reported"]["input_tokens"] == stats["input_tokens"]
        assert trace["cost"]["reported"]["output_tokens"] == stats["output_tokens"]
        assert (trace["cost"]["estimated"] is not None) == (fault in ("malformed", "disconnect", "cut"))
    assert await nothing_runs()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("429", "rate limit of .* is exceeded"),
        ("500", "status 500"),
        ("529", "status 529"),
        ("malformed", "broke off"),
        ("disconnect", "no connection"),
        ("cut", "broke off|no connection"),
    ],
)
async def test_what_does_not_pass_is_one_clear_error(wire: str, fault: str, said: str) -> None:
    with aimock(faults={fault: 1.0}) as server:
        sot = sot_on(wire, server, retries=Retries(max_attempts=2, first_pause_seconds=0.0))
        with pytest.raises(ProviderError, match=said) as caught:
            await sot.ainvoke(QUESTION)
        assert server.stats()["requests"] == 2
        assert caught.value.trace is not None
        assert caught.value.trace["num_requests"] == 2
    assert await nothing_runs()


async def test_a_stream_that_goes_on_from_what_was_read(server: Aimock) -> None:
    """A cut in mid-stream of a point that is being read is mended without a word twice."""
    with aimock(faults={"cut": 0.4}, seed=3) as cutting:
        sot = sot_on("anthropic", cutting, retries=Retries(max_attempts=20, first_pause_seconds=0.0))
        for _ in range(5):
            chunks = [chunk async for chunk in sot.astream(QUESTION)]
            assert "".join(chunk.text for chunk in chunks) == WHOLE
        without = sot_on("chat", cutting, retries=Retries(max_attempts=20, first_pause_seconds=0.0))
        for _ in range(5):
            assert "".join([chunk.text async for chunk in without.astream(QUESTION)]) == WHOLE
        assert cutting.stats()["faults"]["cut"] > 5


async def test_prefill_is_learned_once_per_model() -> None:
    with aimock(refuse=["prefill"]) as server:
        sot = sot_on("anthropic", server, "newest-1")
        assert sot.provider.supports_prefill
        message = await sot.ainvoke(QUESTION)
        assert message.text == WHOLE
        assert not sot.provider.supports_prefill
        assert message.response_metadata["sot"]["num_requests"] == 5  # the refusal is a request, too
        again = sot_on("anthropic", server, "newest-1")
        assert (await again.ainvoke(QUESTION)).response_metadata["sot"]["num_requests"] == 4
        assert sot_on("anthropic", server, "older-1").provider.supports_prefill
        assert server.stats()["prefills"] == 1


def test_messages_in_anthropics_form() -> None:
    call = {"name": "search", "args": {"q": "x"}, "id": "1", "type": "tool_call"}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    made = make_request(
        [
            SystemMessage("Be brief."),
            HumanMessage([{"type": "text", "text": "Look:"}, image]),
            AIMessage("Well.", tool_calls=[call]),
            ToolMessage("found", tool_call_id="1"),
            HumanMessage("And?"),
        ]
    )
    assert made["system"] == [{"type": "text", "text": "Be brief."}]
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant", "user"]
    assert made["messages"][0]["content"][1]["source"]["data"] == "aGk="
    assert made["messages"][1]["content"][1] == {
        "type": "tool_use",
        "id": "1",
        "name": "search",
        "input": {"q": "x"},
    }
    assert [block["type"] for block in made["messages"][2]["content"]] == ["tool_result", "text"]
    with pytest.raises(ValueError, match="does not support"):
        make_request([HumanMessage([{"type": "audio", "base64": "x", "mime_type": "audio/wav"}])])


async def test_price(server: Aimock) -> None:
    prices = {"m": Price(input=1.0, output=4.0), "m-1": Price(input=2.0, output=8.0)}
    message = await sot_on("chat", server, "m-1", prices=prices).ainvoke(QUESTION)
    cost = message.response_metadata["sot"]["cost"]
    reported = cost["reported"]
    assert cost["price"] == pytest.approx(
        (2 * reported["input_tokens"] + 8 * reported["output_tokens"]) / 1e6
    )
    assert set(cost["stages"]) == {"skeleton", "points"}
    assert cost["saved_by_cache"] == 0
    assert [point["label"] for point in message.response_metadata["sot"]["points"]] == LABELS
