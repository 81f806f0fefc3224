"""What other models have written before: each API is sent what it takes."""

import json
import logging
from itertools import pairwise
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

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


def calling(*ids: str | None) -> AIMessage:
    return AIMessage("", tool_calls=[ToolCall(name="f", args={}, id=one) for one in ids])


def result(call_id: str, text: str = "y") -> ToolMessage:
    return ToolMessage(text, tool_call_id=call_id)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([calling("c")], [("c", None)]),
        ([calling("c", "d"), result("d")], [("c", None), ("d", "y")]),
        ([calling("c"), HumanMessage("Wait."), result("c")], [("c", "y")]),
        ([result("x"), calling("c"), result("c"), result("x")], [("c", "y")]),
        ([calling("c"), result("c", "a"), result("c", "b")], [("c", "a")]),
        ([calling("c"), calling("c"), result("c", "b")], [("c", None), ("call00004", "b")]),
        ([calling("c"), result("c", "a"), calling("c"), result("c", "b")], [("c", "a"), ("call00004", "b")]),
        ([calling("", None), result("", "a"), result("", "b")], [("call00002", "a"), ("call00003", "b")]),
        ([calling("functions.f:0"), result("functions.f:0")], [("call00002", "y")]),
        ([calling("c" * 41), result("c" * 41)], [("call00002", "y")]),
        ([AIMessage([{"type": "tool_use", "id": "c.1", "name": "f", "input": {}}])], [("call00002", None)]),
        (
            [calling("c"), HumanMessage([{"type": "tool_result", "tool_use_id": "c", "content": "y"}])],
            [("c", "y")],
        ),
    ],
)
async def test_each_call_has_one_result_behind_it(
    wire: str, history: list[BaseMessage], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    turns = (await sent(wire, HumanMessage("x"), *history))["messages"]
    if wire == "openai":
        calls = [call["id"] for turn in turns for call in turn.get("tool_calls", ())]
        told = [(turn["tool_call_id"], turn["content"]) for turn in turns if turn["role"] == "tool"]
        roles = [turn["role"] for turn in turns if turn["content"] != "Wait."]
        assert all(roles[i - 1] in ("assistant", "tool") for i, role in enumerate(roles) if role == "tool")
    else:
        blocks = [block for turn in turns for block in turn["content"]]
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        told = [(one["tool_use_id"], one["content"]) for one in blocks if one["type"] == "tool_result"]
        for turn, after in pairwise(turns):
            asked = [block["id"] for block in turn["content"] if block["type"] == "tool_use"]
            assert [one.get("tool_use_id") for one in after["content"]][: len(asked)] == asked
    assert calls == [call_id for call_id, _ in told]
    known = [(call_id, None if "no result" in str(text) else text) for call_id, text in told]
    assert [(call_id, text and str(text)) for call_id, text in known] == expected
    num_given = sum(one.type == "tool" or not isinstance(one.content, str) for one in history)
    is_whole = num_given == sum(text is not None for _, text in expected) == len(expected)
    assert is_whole != any(word in caplog.text for word in ("no result", "no call"))


@pytest.mark.parametrize("wire", WIRES)
async def test_halves_of_characters_in_calls_are_replaced(wire: str) -> None:
    call = {"name": "f", "args": {"\ud83d": ["\ud83d", 1]}, "id": "c", "type": "tool_call"}
    request = await sent(wire, AIMessage("", tool_calls=[call]), ToolMessage("y", tool_call_id="c"))
    assert "\\ud83d" not in repr(request).replace("\\\\", "\\")


def test_a_system_message_alone_is_a_turn_at_anthropic() -> None:
    content = [{"type": "text", "text": "Say hello."}]
    made = make_request([SystemMessage("Say hello.")])
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


async def test_what_changes_nothing_is_not_sent_to_anthropic_and_what_does_is() -> None:
    off = {"n": 1, "top_p": 1, "repetition_penalty": 1.0, "min_p": 0, "logit_bias": {}, "echo": False}
    on = {"temperature": 0, "top_k": 5, "repetition_penalty": 1.1, "stop_sequences": ["x"]}
    assert not off.keys() & await sent("anthropic", **off)
    assert on.items() <= (await sent("anthropic", **on)).items()
    assert off.items() <= (await sent("openai", **off)).items()  # whose servers may have other defaults


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
