"""What other models have written before: each API is sent what it takes."""

import json
import logging
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from sot_chains import ModelProfile, Retries
from sot_chains.providers.anthropic import make_request
from sot_chains.providers.base import warn_once
from tests.sot_chains.fakes import PLAIN, QUESTION
from tests.sot_chains.providers.test_replies import Plainly, asked_for
from tests.sot_chains.wire_server import WIRES, Reply, json_reply, whole_reply, wire_server

ASKED = HumanMessage("And?")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
THOUGHTS: list[str | dict[Any, Any]] = [
    {"type": "thinking", "thinking": "hm"},
    {"type": "reasoning", "summary": []},
    {"type": "web_search_call", "id": "w"},
    {"type": "text", "text": " "},
    {"type": "refusal", "refusal": "No."},
    {"type": "text", "text": "Well."},
]


async def sent(wire: str, *messages: BaseMessage, **parameters: Any) -> dict[str, Any]:
    """The request for a plain answer."""
    warn_once.cache_clear()
    async with wire_server(whole_reply(wire, PLAIN)) as server:
        sot = server.sot(wire, router=Plainly())
        assert (await sot.ainvoke([*messages, ASKED], **parameters)).text == PLAIN
        return server.requests[-1]


@pytest.mark.parametrize("wire", WIRES)
async def test_what_another_api_has_written_is_left_out_with_a_warning(
    wire: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        request = await sent(wire, HumanMessage("x"), AIMessage(THOUGHTS))
    said = [part.get("text") or part.get("refusal") for part in request["messages"][1]["content"]]
    assert [text for text in said if text.strip()] == ["No.", "Well."]
    assert {part["type"] for part in request["messages"][1]["content"]} <= {"text", "refusal"}
    assert wire == "openai" or " " not in said  # which Anthropic refuses
    for kind in ("thinking", "reasoning", "web_search_call"):
        assert f"'{kind}'" in caplog.text


async def test_anthropics_own_content_goes_back_to_it_as_it_came() -> None:
    own: list[str | dict[Any, Any]] = [
        {"type": "thinking", "thinking": "hm", "signature": "s", "index": 0},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Well.", "index": 3},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ]
    calls = [{"name": "f", "args": {}, "id": "c", "type": "tool_call"}]
    for metadata in ({}, {"model_provider": "anthropic"}):
        given = AIMessage(own, tool_calls=calls, response_metadata=metadata)
        request = await sent("anthropic", HumanMessage("x"), given, ToolMessage("y", tool_call_id="c"))
        expected = [{name: one[name] for name in one if name != "index"} for one in own]  # type: ignore[index]  # dicts
        assert request["messages"][1]["content"] == expected
    request = await sent("anthropic", HumanMessage("x"), AIMessage(own), ToolMessage("y", tool_call_id="c"))
    assert [one["type"] for one in request["messages"][1]["content"]].count("tool_use") == 1


async def test_images_in_tool_results(caplog: pytest.LogCaptureFixture) -> None:
    call = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "c", "type": "tool_call"}])
    result = ToolMessage([{"type": "text", "text": "y"}, IMAGE], tool_call_id="c")
    request = await sent("anthropic", HumanMessage("x"), call, result)
    blocks = request["messages"][2]["content"][0]["content"]
    assert [block["type"] for block in blocks] == ["text", "image"]
    assert blocks[1]["source"]["data"] == "aGk="
    request = await sent("openai", HumanMessage("x"), call, result)
    assert request["messages"][2]["content"] == [{"type": "text", "text": "y"}]
    assert "'image_url' in messages of the role 'tool'" in caplog.text


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("given", "told"), [("", {}), ('{"a": ', {"arguments": '{"a": '})])
async def test_a_call_with_broken_arguments_keeps_its_result(wire: str, given: str, told: Any) -> None:
    broken = {"name": "f", "args": given, "id": "c", "error": None, "type": "invalid_tool_call"}
    message = AIMessage("", invalid_tool_calls=[broken])
    request = await sent(wire, HumanMessage("x"), message, ToolMessage("no JSON", tool_call_id="c"))
    if wire == "anthropic":
        assert request["messages"][1]["content"] == [
            {"type": "tool_use", "id": "c", "name": "f", "input": told}
        ]
    else:
        (call,) = request["messages"][1]["tool_calls"]
        assert (call["id"], json.loads(call["function"]["arguments"])) == ("c", told)


@pytest.mark.parametrize("wire", WIRES)
async def test_halves_of_characters_in_calls_are_replaced(wire: str) -> None:
    call = {"name": "f", "args": {"\ud83d": ["\ud83d", 1]}, "id": "c", "type": "tool_call"}
    request = await sent(wire, AIMessage("", tool_calls=[call]), ToolMessage("y", tool_call_id="c"))
    assert "\\ud83d" not in repr(request).replace("\\\\", "\\")


def test_a_system_message_alone_is_a_turn_at_anthropic() -> None:
    content = [{"type": "text", "text": "Say hello."}]
    made = make_request([SystemMessage("Say hello.")], None)
    assert made == {"messages": [{"role": "user", "content": content}]}


async def test_a_seed_is_a_wish_at_anthropic(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert "seed" not in await sent("anthropic", seed=3)
    assert "takes no seed" in caplog.text
    caplog.clear()
    async with wire_server(whole_reply("anthropic", PLAIN)) as server:
        await server.sot("anthropic", router=Plainly()).ainvoke("x", seed=3)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]  # it is said once
    assert (await sent("openai", seed=3))["seed"] == 3


async def test_a_field_of_any_type_is_the_servers_to_judge() -> None:
    odd = {"system": {"a": {}}, "thinking": ["x"], "metadata": 7, "tools": {"a": 1}, "top_k": 5}
    request = await sent("anthropic", **odd, extra_body={"more": 1})
    assert odd.items() <= request.items()
    assert request["more"] == 1


async def test_a_refused_prefill_is_remembered_by_every_chain() -> None:
    def reply(request: dict[str, Any], number: int) -> Reply:
        if request["messages"][-1]["role"] == "assistant":
            return json_reply({"error": {"message": "prefill is not supported"}}, 400)
        return whole_reply("anthropic", asked_for(request))

    profile = ModelProfile(prefill=True)
    async with wire_server(reply) as server:
        for num_refused in (1, 0):
            server.requests.clear()
            sot = server.sot("anthropic", "prefilled", profile=profile, retries=Retries(max_attempts=1))
            await sot.ainvoke(QUESTION)
            begun = [one for one in server.requests if one["messages"][-1]["role"] == "assistant"]
            assert len(begun) == num_refused
