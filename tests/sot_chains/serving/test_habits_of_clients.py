"""What clients and models send that means nothing, comes late or is broken, and what becomes of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, BaseMessage, convert_to_messages
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from sot_chains import Retries
from sot_chains.providers import ProviderError, make_provider
from tests.sot_chains.fakes import PLAIN, QUESTION, PacedChatModel, answer_to, what
from tests.sot_chains.server import MODEL, ChatServer, chat_server
from tests.sot_chains.serving.models import ToolChatModel
from tests.sot_chains.serving.running import Served, served
from tests.sot_chains.wire_server import Reply, chunk, event, text_delta, whole_reply, wire_server

ASKED: Any = [{"role": "user", "content": QUESTION}]
IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
KINDS = ["chat model", "openai", "anthropic"]


def _answer(messages: Any) -> str:
    return PLAIN


@pytest.fixture(scope="module")
def upstream() -> Iterator[ChatServer]:
    with chat_server() as running:
        running.answer = _answer
        yield running


@pytest.fixture(scope="module", params=KINDS)
def running(request: pytest.FixtureRequest, upstream: ChatServer) -> Iterator[Served]:
    urls = {"openai": upstream.url, "anthropic": upstream.anthropic_url}
    if request.param in urls:
        model: Any = make_provider(f"{request.param}:{MODEL}", base_url=urls[request.param])
    else:
        model = PacedChatModel(answer=_answer)
    with served(model, name="m") as one:
        yield one


_CONTEXT = ssl.create_default_context()  # reading the certificates takes longer than a request


def _ask(running: Served, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": "m", **({"input": QUESTION} if path == "responses" else {"messages": ASKED}), **fields}
    return httpx.post(f"{running.api}/{path}", json=body, timeout=20, verify=_CONTEXT)


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "seed": 3, "n": 1},
        {"stream": None, "stream_options": {"include_usage": None}, "temperature": None, "tools": None},
        {"logprobs": False, "top_logprobs": 0, "parallel_tool_calls": True, "user": "me", "stop": []},
        {"stop": None, "references": None, "tool_choice": None, "logprobs": None, "functions": None},
        {"store": False, "metadata": {}, "service_tier": "auto", "modalities": [], "tool_choice": "none"},
        {
            "chat_template_kwargs": {},
            "options": {},
            "prediction": None,
            "max_tokens": None,
            "stream_options": {},
        },
        {"function_call": "auto", "functions": [], "best_of": 1, "echo": False, "suffix": "", "top_p": 1},
        {
            "repetition_penalty": 1.0,
            "min_p": 0,
            "top_k": 0,
            "typical_p": 1,
            "ignore_eos": False,
            "min_tokens": 0,
        },
    ],
)
def test_what_changes_nothing_is_taken_by_every_model(running: Served, fields: dict[str, Any]) -> None:
    assert _text(_ask(running, **fields)) == PLAIN


def test_null_within_messages_is_what_is_not_sent(running: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
        {"role": "assistant", "content": "z", "tool_calls": None, "function_call": None},
        {"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": None}]},
    ]
    assert _text(_ask(running, messages=turns)) == PLAIN


def test_what_an_api_has_no_field_for_is_refused_by_its_name(upstream: ChatServer) -> None:
    with served(make_provider(f"anthropic:{MODEL}", base_url=upstream.anthropic_url), name="m") as running:
        for field in ({"frequency_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"presence_penalty": -1}):
            response = _ask(running, **field)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(field))
        response = _ask(running, response_format={"type": "json_object"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("mode", ["m", "m:sot"])
def test_fields_that_the_sdk_does_not_know_reach_the_server(upstream: ChatServer, mode: str) -> None:
    fields = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    template = {"chat_template_kwargs": {"enable_thinking": False, "x": None}}
    with served(make_provider(f"openai:{MODEL}", base_url=upstream.url), name="m") as running:
        upstream.requests.clear()
        assert _text(_ask(running, model=mode, **fields, **template))
    assert all(fields.items() <= one.items() and template.items() <= one.items() for one in upstream.requests)


@pytest.mark.parametrize("mode", ["m", "m:auto"])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [IMAGE]}],
        [{"role": "system", "content": "Say hello."}],
        [{"role": "system", "content": "Say hello."}, {"role": "assistant", "content": "Hel"}],
    ],
)
def test_a_request_without_a_question_is_answered_as_the_model_does(
    running: Served, mode: str, messages: Any
) -> None:
    assert _text(_ask(running, model=mode, messages=messages)) == PLAIN


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("\\ud83d", "\ufffd"),
        ("x\\ud83dy\\uDE00", "x\ufffdy\ufffd"),
        ("\\ud83d\\ude00", "\U0001f600"),
        (r"\\ud83d \\\\ud83d", r"\ud83d \\ud83d"),
        ("\\ud83d\\ud83d\\ude00\\n", "\ufffd\U0001f600\n"),
    ],
)
def test_half_an_emoji_in_a_body_is_replaced(sent: str, read: str) -> None:
    model = PacedChatModel(answer=_answer)
    with served(model) as running:
        body = json.dumps({"model": "paced", "messages": [{"role": "user", "content": "@"}]})
        assert httpx.post(f"{running.api}/chat/completions", content=body.replace("@", sent)).is_success
    assert model.requests[-1][-1].content == read


def test_half_an_emoji_in_a_stream_is_joined_or_replaced() -> None:
    model = PacedChatModel(answer=lambda messages: "a\ud83d \ude00b c\ud83d d")
    halves = PacedChatModel(answer=lambda messages: "\ud83d")
    with served(model) as running, served(halves) as other:
        for path in ("chat/completions", "responses"):
            for stream in (False, True):
                for one in (running, other):
                    response = _ask(one, path, model="paced", stream=stream)
                    assert response.status_code == 200
                    assert "\\ud83d" not in response.text
                    assert "\\ufffd" in response.text


class EndingChatModel(PacedChatModel):
    """Ends half an answer with a reason."""

    reason: str
    field: str = "finish_reason"

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=AIMessageChunk(content="Half an"))
        last = AIMessageChunk(content="", response_metadata={self.field: self.reason})
        yield ChatGenerationChunk(message=last)


@pytest.mark.parametrize("reason", ["error", "abort", "network_error", "insufficient_system_resource"])
@pytest.mark.parametrize("mode", ["paced", "paced:auto"])
def test_half_an_answer_is_never_called_whole(
    reason: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retries, "pause_seconds", lambda *given: 0.0)
    with served(EndingChatModel(reason=reason)) as running:
        asked: Any = {"model": mode, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
        assert _ask(running, **asked).status_code == 502
        streamed = _ask(running, **asked, stream=True)
        assert '"finish_reason": "stop"' not in streamed.text
        assert streamed.status_code == 502 or '"error": {' in streamed.text
        asked = {"model": mode, "input": "What is 3 + 4?"}
        assert "response.completed" not in _ask(running, "responses", **asked, stream=True).text


@pytest.mark.parametrize("mode", ["m", "m:sot"])
@pytest.mark.parametrize("wire", ["openai", "anthropic"])
async def test_half_an_answer_of_a_broken_connection_is_not_called_whole(
    mode: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retries, "pause_seconds", lambda *given: 0.0)
    text = "1. Fixed hours\n2. Dark room\n3. Less coffee"

    def reply(request: dict[str, Any], number: int) -> Reply:
        if number == 0 and mode == "m:sot":
            return whole_reply(wire, text)
        return Reply([event(chunk("Half an") if wire == "openai" else text_delta("Half an"))], ends=False)

    async with wire_server(reply) as upstream:
        url = f"http://127.0.0.1:{upstream.port}" + ("/v1" if wire == "openai" else "")
        with served(make_provider(f"{wire}:x", base_url=url, api_key="k"), name="m") as running:
            for path in ("chat/completions", "responses"):
                for stream in (False, True):
                    upstream.requests.clear()
                    told = await asyncio.to_thread(_ask, running, path, model=mode, stream=stream)
                    assert '"finish_reason": "stop"' not in told.text
                    assert '"status": "completed", "incomplete_details": null' not in told.text
                    assert told.status_code == (200 if stream or mode == "m:sot" else 502)


def test_a_tool_without_a_name_is_refused() -> None:
    with served(ToolChatModel()) as running:
        for function in ({}, {"name": None}, None, 5):
            told = _ask(running, model="paced", tools=[{"type": "function", "function": function}])
            assert (told.status_code, told.json()["error"]["param"]) == (400, "tools")


def test_a_call_in_a_system_message_is_refused(upstream: ChatServer) -> None:
    with served(make_provider(f"openai:{MODEL}", base_url=upstream.url), name="m") as running:
        content = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
        assert _ask(running, messages=[{"role": "system", "content": content}, *ASKED]).status_code == 400


def test_content_that_an_api_cannot_take_is_refused(upstream: ChatServer) -> None:
    with served(make_provider(f"anthropic:{MODEL}", base_url=upstream.anthropic_url), name="m") as running:
        for image in ({"url": ""}, {"url": "", "detail": "low"}):
            content = [{"type": "image_url", "image_url": image}]
            assert _ask(running, messages=[{"role": "user", "content": content}]).status_code == 400


@pytest.mark.parametrize(
    ("reason", "told"),
    [("sensitive", "content_filter"), ("SAFETY", "content_filter"), ("max_tokens", "length")],
)
def test_known_ends_are_told_in_openais_words(reason: str, told: str) -> None:
    with served(EndingChatModel(reason=reason, field="stop_reason")) as running:
        assert _ask(running, model="paced").json()["choices"][0]["finish_reason"] == told
        assert f'"finish_reason": "{told}"' in _ask(running, model="paced", stream=True).text


def test_what_a_call_took_that_we_ended_is_counted() -> None:
    again = "one two three four five six seven eight nine " * 50
    model = PacedChatModel(answer=lambda messages: again)
    with (
        served(model, profile="small") as running,
        openai.OpenAI(base_url=running.api, api_key="none") as client,
    ):
        asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
        whole = client.chat.completions.create(model="paced:auto", messages=asked)
        assert whole.usage
        assert whole.usage.completion_tokens > 10
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        *_, last = client.chat.completions.create(
            model="paced:auto", messages=asked, stream=True, stream_options={"include_usage": True}
        )
        assert last.usage
        assert last.usage.total_tokens > 10
        answered = client.responses.create(model="paced:auto", input="What is the capital of France?")
        assert answered.usage
        assert answered.usage.total_tokens > 10


@pytest.mark.parametrize("path", ["/health", "/healthz", "/ready", "/livez", "/ping", "/health/"])
def test_monitors_need_no_key_and_no_name_of_the_host(path: str) -> None:
    with served(PacedChatModel(), api_key="sesame") as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as plain:
            plain.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert b" 200 " in plain.recv(1000)
        assert httpx.get(running.url + path).json()["status"] == "ok"
        probed = httpx.head(running.url + path)
        assert (probed.status_code, probed.text) == (200, "")


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_stream_begins_before_a_model_that_thinks(path: str) -> None:
    with served(PacedChatModel(answer=_answer, pause=2.0)) as running:
        field = {"messages": ASKED} if path == "chat/completions" else {"input": QUESTION}
        body = {"model": "paced", "stream": True, **field}
        begin = time.monotonic()
        with httpx.stream("POST", f"{running.api}/{path}", json=body, timeout=20) as response:
            first = next(response.iter_bytes())
            assert first.startswith(b": ")
            assert time.monotonic() - begin < 2.0  # before the model's first word, which comes no earlier


def test_an_error_after_the_begin_of_a_stream_is_an_event() -> None:
    slow = PacedChatModel(answer=_answer, pause=0.8, fail=lambda messages: True)
    with served(slow) as running, openai.OpenAI(base_url=running.api, api_key="x", max_retries=0) as client:
        stream = client.chat.completions.create(model="paced", messages=ASKED, stream=True)
        with pytest.raises(openai.APIError, match="the model broke"):
            list(stream)
        *_, last = client.responses.create(model="paced", input=QUESTION, stream=True)
        assert last.type == "error"


@pytest.mark.parametrize("origin", ["tauri://localhost", "https://app.example", "null"])
def test_pages_of_allowed_origins_may_ask(origin: str) -> None:
    def ask(running: Served, **headers: str) -> httpx.Response:
        body = {"model": "paced", "messages": ASKED}
        return httpx.post(f"{running.api}/chat/completions", json=body, headers=headers)

    with served(PacedChatModel(), allow=[f"{origin}/", "my-container"], api_key="k") as running:
        wish = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        asked = httpx.options(f"{running.api}/chat/completions", headers={"origin": origin, **wish})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == origin
        assert "authorization" in asked.headers["access-control-allow-headers"]
        answered = ask(running, origin=origin, authorization="Bearer k", host="my-container:8000")
        assert answered.status_code == 200
        assert answered.headers["access-control-allow-origin"] == origin
        assert ask(running, origin=origin).status_code == 401  # a page needs the key, too
        assert ask(running, origin="https://evil.example", authorization="Bearer k").status_code == 403
        assert ask(running, host="evil.example", authorization="Bearer k").status_code == 403
    with served(PacedChatModel()) as running:
        assert ask(running, origin=origin).status_code == 403


class UnnumberedChatModel(ToolChatModel):
    """Calls two tools, and numbers and names no call."""

    ids: tuple[str | None, str | None] = (None, None)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        self._requests.append(messages)
        for city, call_id in zip(("Köln", "Bonn"), self.ids, strict=True):
            arguments = json.dumps({"city": city})
            piece = tool_call_chunk(name="weather", args=arguments, id=call_id, index=None)
            yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[piece]))


@pytest.mark.parametrize("ids", [(None, None), ("a", None), ("a", "b")])
def test_calls_that_nobody_numbers_are_two_in_order_each_with_an_id(ids: tuple[Any, Any]) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    cities = [{"city": "Köln"}, {"city": "Bonn"}]
    model = UnnumberedChatModel(ids=ids)
    with served(model) as running, openai.OpenAI(base_url=running.api, api_key="x") as client:
        asked: Any = {"model": "paced", "messages": ASKED}
        asked["tools"] = [{"type": "function", "function": function}]
        message = client.chat.completions.create(**asked).choices[0].message
        calls: Any = message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == cities
        assert len({call.id for call in calls} - {None, ""}) == 2
        with client.chat.completions.stream(**asked) as stream:
            calls = stream.get_final_completion().choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == cities
        assert len({call.id for call in calls} - {None, ""}) == 2
        asked = {"model": "paced", "input": QUESTION, "tools": [{"type": "function", **function}]}
        whole = client.responses.create(**asked).output
        with client.responses.stream(**asked) as events:
            streamed = events.get_final_response().output
        for output in (whole, streamed):
            calls = [one for one in output if one.type == "function_call"]
            assert [json.loads(call.arguments) for call in calls] == cities
            assert len({call.call_id for call in calls} - {None, ""}) == 2
        results = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "Rain"} for one in calls
        ]
        turns: Any = [*ASKED, *(one.model_dump() for one in calls), *results]
        client.responses.create(**{**asked, "input": turns})
        history: Any = model.requests[-1]
        assert [one.type for one in history] == ["human", "ai", "tool", "tool"]
        assert [call["args"] for call in history[1].tool_calls] == cities


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 10 tokens, your request has 20",
        "prompt is too long: 20 tokens > 10 maximum",
        "the request exceeds the available context size",
    ],
)
def test_a_prompt_that_is_too_long_has_openais_code(said: str) -> None:
    def overflow(messages: Any) -> str:
        raise ProviderError(said, status=400)

    with served(PacedChatModel(answer=overflow)) as running:
        for path in ("chat/completions", "responses"):
            for stream in (False, True):
                response = _ask(running, path, model="paced", stream=stream)
                assert response.status_code == 400
                assert response.json()["error"]["code"] == "context_length_exceeded"
        model = ChatOpenAI(model="paced", base_url=running.api, api_key=SecretStr("k"), max_retries=0)
        with pytest.raises(ContextOverflowError):
            model.invoke(QUESTION)
        with pytest.raises(ContextOverflowError):
            list(model.stream(QUESTION))


@pytest.mark.parametrize("wire", ["openai", "anthropic"])
@pytest.mark.parametrize(
    ("reason", "told"), [("length", "length"), ("content_filter", "content_filter"), ("stop", "stop")]
)
async def test_a_reply_without_text_is_one(wire: str, reason: str, told: str) -> None:
    async with wire_server(whole_reply(wire, "", finish=reason)) as upstream:
        url = f"http://127.0.0.1:{upstream.port}" + ("/v1" if wire == "openai" else "")
        with served(make_provider(f"{wire}:x", base_url=url, api_key="k"), name="m") as running:
            whole = await asyncio.to_thread(_ask, running)
            assert _text(whole) == ""
            assert whole.json()["choices"][0]["finish_reason"] == told
            assert whole.json()["usage"]["total_tokens"] == 10
            streamed = await asyncio.to_thread(_ask, running, stream=True)
            assert f'"finish_reason": "{told}"' in streamed.text
            answered = (await asyncio.to_thread(_ask, running, "responses")).json()
            assert answered["status"] == ("completed" if told == "stop" else "incomplete")


async def test_a_call_of_a_tool_that_nobody_offered_is_no_answer() -> None:
    async with wire_server(whole_reply("openai", "", finish="tool_calls")) as upstream:
        url = f"http://127.0.0.1:{upstream.port}/v1"
        with served(make_provider("openai:x", base_url=url, api_key="k"), name="m") as running:
            assert (await asyncio.to_thread(_ask, running)).status_code == 502


async def test_an_answer_without_one_of_its_points_is_not_called_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Retries, "pause_seconds", lambda *given: 0.0)

    def reply(request: dict[str, Any], number: int) -> Reply:
        asked = convert_to_messages(request["messages"])
        return whole_reply("openai", answer_to(asked)) if what(asked) != "Dark room" else Reply([b""])

    async with wire_server(reply) as upstream:
        url = f"http://127.0.0.1:{upstream.port}/v1"
        with served(make_provider("openai:x", base_url=url, api_key="k"), name="m") as running:
            whole = await asyncio.to_thread(_ask, running, model="m:sot")
            assert whole.json()["choices"][0]["finish_reason"] == "length"
            assert "Less coffee" in _text(whole)
            streamed = await asyncio.to_thread(_ask, running, model="m:sot", stream=True)
            assert '"finish_reason": "stop"' not in streamed.text


@pytest.mark.parametrize("part", ["outline", "Dark room"])
@pytest.mark.parametrize(
    ("reason", "told"),
    [("length", "length"), ("content_filter", "content_filter"), ("model_length", "length")],
)
async def test_an_answer_whose_outline_or_point_was_cut_is_not_called_whole(
    part: str, reason: str, told: str
) -> None:
    def reply(request: dict[str, Any], number: int) -> Reply:
        asked = convert_to_messages(request["messages"])
        is_cut = what(asked) == part
        text = answer_to(asked)
        text = f"{text}\n4. Warm mi" if is_cut and part == "outline" else text[: -4 if is_cut else None]
        return whole_reply("openai", text, finish=reason if is_cut else None)

    async with wire_server(reply) as upstream:
        url = f"http://127.0.0.1:{upstream.port}/v1"
        with served(make_provider("openai:x", base_url=url, api_key="k"), name="m") as running:
            whole = (await asyncio.to_thread(_ask, running, model="m:sot")).json()
            assert whole["choices"][0]["finish_reason"] == told
            assert not whole["sot"]["is_complete"]
            assert [one["label"] for one in whole["sot"]["failures"]] == [part]
            streamed = await asyncio.to_thread(_ask, running, model="m:sot", stream=True)
            assert f'"finish_reason": "{told}"' in streamed.text
            answered = await asyncio.to_thread(_ask, running, "responses", model="m:sot")
            assert answered.json()["status"] == "incomplete"


class PiecesChatModel(ToolChatModel):
    """Calls tools in the given pieces: name, arguments, id and number of each."""

    pieces: list[tuple[str | None, str | None, str | None, int | None]]
    reason: str = "tool_calls"

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        for name, arguments, call_id, number in self.pieces:
            piece = tool_call_chunk(name=name, args=arguments, id=call_id, index=number)
            yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[piece]))
        ended = AIMessageChunk(content="", response_metadata={"finish_reason": self.reason})
        yield ChatGenerationChunk(message=ended)


FIRST, SECOND = '{"city": "K\u00f6ln"}', '{"city": "Bonn"}'
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}}


def _calls(running: Served, path: str, *, stream: bool) -> list[tuple[str, str, str]]:
    """The calls that a client is told: id, name and arguments."""
    http = openai.DefaultHttpxClient(verify=_CONTEXT)
    with openai.OpenAI(base_url=running.api, api_key="x", max_retries=0, http_client=http) as client:
        if path == "responses":
            asked: Any = {"model": "m", "input": QUESTION, "tools": [{"type": "function", **FUNCTION}]}
            if not stream:
                output: Any = client.responses.create(**asked).output
            else:
                with client.responses.stream(**asked) as events:
                    output = events.get_final_response().output
            return [(one.call_id, one.name, one.arguments) for one in output if one.type == "function_call"]
        asked = {"model": "m", "messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}]}
        if not stream:
            calls: Any = client.chat.completions.create(**asked).choices[0].message.tool_calls
        else:
            with client.chat.completions.stream(**asked) as chunks:
                calls = chunks.get_final_completion().choices[0].message.tool_calls
        return [(one.id, one.function.name, one.function.arguments) for one in calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize(
    "pieces",
    [
        [("weather", FIRST[:4], "a", None), (None, FIRST[4:], None, None), ("weather", SECOND, "b", None)],
        [("weather", FIRST[:4], None, None), (None, FIRST[4:], None, None), ("weather", SECOND, None, None)],
        [("weather", FIRST[:4], "a", None), (None, FIRST[4:], "a", None), ("weather", SECOND, "b", None)],
        [
            *(("weather", FIRST[:4], "a", None), ("weather", SECOND[:4], "b", None)),
            *((None, FIRST[4:], "a", None), (None, SECOND[4:], "b", None)),
        ],
        [("weather", FIRST, "a", 0), ("weather", SECOND, "b", 0)],
        [("weather", FIRST, "a", 0), ("weather", SECOND, "a", 1)],
        [(None, None, "a", 0), ("weather", FIRST, None, 0), ("weather", SECOND, "", 1)],
        [("wea", None, "a", 0), ("ther", FIRST, None, 0), ("weather", SECOND, None, 1)],
        # All alike: whole ones, ones with the name in each piece, ones with another id in each piece.
        [("weather", FIRST, None, 0), ("weather", SECOND, None, 0)],
        [("weather", FIRST, None, None), ("weather", SECOND, None, None), ("weather", "", None, None)],
        *(
            [
                *(("weather", "", None, number), ("weather", FIRST[:4], None, number)),
                *(("weather", FIRST[4:], None, number), ("weather", SECOND, None, number)),
            ]
            for number in (0, None)
        ),
        [("weather", FIRST[:4], "a", 0), ("weather", FIRST[4:], "a", 0), ("weather", SECOND, "b", 0)],
        [("weather", FIRST[:4], "a", 0), (None, FIRST[4:], "b", 0), ("weather", SECOND, "c", 1)],
    ],
)
def test_pieces_of_calls_are_joined_as_they_belong(pieces: Any, path: str, stream: bool) -> None:
    with served(PiecesChatModel(pieces=pieces), name="m") as running:
        calls = _calls(running, path, stream=stream)
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        *(("weather", {"city": "K\u00f6ln"}), ("weather", {"city": "Bonn"}))
    ]
    assert len({call_id for call_id, _, _ in calls} - {None, ""}) == 2


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize(
    "text", [r'{"a": "\u00f6\ud83d\ude00\\ \""}', '{"a": "\u00f6\ud83d\ude00"}', '{"\ud83d": 1}']
)
def test_arguments_may_be_cut_within_a_character_or_an_escape(path: str, text: str) -> None:
    whole = json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    model = PiecesChatModel(pieces=[])
    with served(model, name="m") as running:
        for index in range(1, len(text)):
            model.pieces = [("weather", text[:index], "a", 0), (None, text[index:], None, 0)]
            for stream in (False, True):
                ((_, _, arguments),) = _calls(running, path, stream=stream)
                assert json.loads(arguments) == whole, (index, stream)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_call_without_arguments_has_an_empty_object(path: str) -> None:
    with served(PiecesChatModel(pieces=[("weather", None, "a", 0)]), name="m") as running:
        for stream in (False, True):
            assert _calls(running, path, stream=stream) == [("a", "weather", "{}")]


def test_a_call_that_is_cut_is_not_called_whole() -> None:
    model = PiecesChatModel(pieces=[("weather", FIRST[:9], "a", 0)], reason="length")
    with served(model, name="m") as running:
        for stream in (False, True):
            tools = [{"type": "function", "function": FUNCTION}]
            told = _ask(running, tools=tools, stream=stream)
            assert '"finish_reason": "length"' in told.text


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_calls_of_a_model_that_does_not_stream_are_streamed(path: str) -> None:
    pieces: Any = [("weather", FIRST, "a", 0), ("weather", SECOND, "b", 1)]
    with served(PiecesChatModel(pieces=pieces, disable_streaming=True), name="m") as running:
        assert [call_id for call_id, _, _ in _calls(running, path, stream=True)] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        *(("", {}), (None, {}), ({"a": 1}, {"a": 1}), ("null", {}), ("[1]", {"arguments": [1]})),
        *(('{"a": ', {"arguments": '{"a": '}), ('{"\\ud83d": 1}', {"\ufffd": 1})),
    ],
)
def test_arguments_of_calls_in_a_history(arguments: Any, args: Any) -> None:
    model = PacedChatModel(answer=_answer)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "c", "content": "y"}, *ASKED]
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    items = [*ASKED, item, {"type": "function_call_output", "call_id": "c", "output": "y"}, *ASKED]
    with served(model, name="m") as running:
        for path, asked in (("chat/completions", {"messages": turns}), ("responses", {"input": items})):
            assert _ask(running, path, **asked).status_code == 200
            history: Any = model.requests[-1]
            assert history[1].tool_calls == [{"name": "f", "args": args, "id": "c", "type": "tool_call"}]
        del call["function"]["name"]  # type: ignore[attr-defined]  # a dict
        assert _ask(running, messages=turns).status_code == 400


@pytest.mark.parametrize("mode", ["m", "m:auto", "m:sot"])
def test_a_chat_model_gets_a_result_for_each_call_and_none_without(mode: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    orphan = {"role": "tool", "tool_call_id": "x", "content": "y"}
    turns = [*ASKED, orphan, {"role": "assistant", "content": None, "tool_calls": [call]}, *ASKED]
    items = [
        *(*ASKED, {"type": "function_call_output", "call_id": "x", "output": "y"}),
        *({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, *ASKED),
    ]
    model = PacedChatModel()
    with served(model, name="m") as running:
        for path, asked in (("chat/completions", {"messages": turns}), ("responses", {"input": items})):
            assert _ask(running, path, model=mode, **asked).status_code == 200
    for history in model.requests:
        assert [one.type for one in history][-4:] == ["human", "ai", "tool", "human"]
        assert [one.type for one in history].count("tool") == 1
        assert "no result" in str(history[-2].content)


def test_a_refusal_in_a_history_is_what_was_said() -> None:
    model = PacedChatModel(answer=_answer)
    with served(model, name="m") as running:
        turns = [*ASKED, {"role": "assistant", "content": None, "refusal": "No."}, *ASKED]
        assert _text(_ask(running, messages=turns)) == PLAIN
    assert model.requests[-1][1].content == "No."


def test_what_surrounds_a_body() -> None:
    body = json.dumps({"model": "m", "messages": ASKED}).encode()
    with served(PacedChatModel(answer=_answer), name="m") as running:
        url = f"{running.api}/chat/completions"
        assert _text(httpx.post(url, content=b"\xef\xbb\xbf" + body)) == PLAIN
        assert _text(httpx.post(url, content=body, headers={"content-type": "text/plain"})) == PLAIN
        for path in ("/v1/chat/completions/", "//v1//chat/completions"):
            assert _text(httpx.post(running.url + path, content=body)) == PLAIN
        packed = httpx.post(url, content=gzip.compress(body), headers={"content-encoding": "gzip"})
        assert (packed.status_code, "gzip" in packed.json()["error"]["message"]) == (415, True)
        assert httpx.get(url).headers["allow"] == "POST"
        assert httpx.get(f"{running.api}/models/").json()["object"] == "list"
        assert httpx.get(f"{running.api}/models/m:sot/").json()["id"] == "m:sot"
        item = {"type": None, "role": "user", "content": QUESTION, "id": None}
        assert _ask(running, "responses", input=[item], client_metadata={"x": "y"}).status_code == 200


async def test_ends_of_a_chat_models_own_words_are_told() -> None:
    for field, reason in (("done_reason", "length"), ("stopReason", "max_tokens")):
        with served(EndingChatModel(reason=reason, field=field)) as running:
            told = await asyncio.to_thread(_ask, running, model="paced")
            assert told.json()["choices"][0]["finish_reason"] == "length"
