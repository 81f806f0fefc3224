"""Requests over the schemas of OpenAI and Anthropic, and replies in all forms: ``make fuzz``.

Every request gets an answer, or an error that says why; every reply is whole, marked as partial, or one clear
error. The file's name keeps it out of other runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, get_type_hints

import httpx
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from langchain_core.messages import convert_to_messages
from langchain_openai import ChatOpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import SecretStr

from sot_chains import Retries
from sot_chains.providers import make_provider
from tests.sot_chains.fakes import QUESTION, PacedChatModel, answer_to, what
from tests.sot_chains.providers.test_fuzz import WORDS, survive
from tests.sot_chains.server import MODEL, chat_server
from tests.sot_chains.serving.running import Served, served
from tests.sot_chains.serving.test_odd_requests import answer_to_any
from tests.sot_chains.wire_server import Reply, chunk, event, text_delta, wire_server

SECONDS = float(os.environ.get("FUZZ_SECONDS", "600")) / 10  # of each test
KINDS = ["chat model", "openai", "anthropic"]
MODES = ["m", "m:sot", "m:auto"]
ROUTES: dict[str, tuple[type, ...]] = {
    "/v1/chat/completions": (CompletionCreateParamsNonStreaming, MessageCreateParamsNonStreaming),
    "/v1/responses": (ResponseCreateParamsNonStreaming,),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# What clients send in one field or another.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63, 0.5, 1e308),
    *("", "auto", "none", "required", "text", "\ud83d", [], {}),
    *({"type": kind} for kind in ("text", "json_object", "json_schema", "function", "auto", "enabled")),
    *({"include_usage": value} for value in (None, True, "yes")),
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
    [{"type": "function", "function": {"name": "look"}}],
    [
        {"role": role, "content": [{"type": "text", "text": QUESTION}]}
        for role in ("user", "assistant", "user")
    ],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": None, "function": {"arguments": ""}}]}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}, {"role": "user", "content": QUESTION}],
    [{"type": "function_call_output", "call_id": "1", "output": "x"}, {"type": "reasoning", "summary": []}],
]
# Content that other models have written, and odd tool calls.
PARTS: list[Any] = [
    *({"type": kind, "text": "x"} for kind in ("text", "input_text", "output_text", "thinking", "refusal")),
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "reasoning", "summary": [], "reasoning": "hm"},
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "c", "content": "x"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    {"type": "image_url", "image_url": "https://x.example/a.png"},
    {"type": "input_image", "image_url": "https://x.example/a.png"},
    {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    {"type": "file", "file": {"file_id": "f"}},
    {"type": "text", "text": ""},
    {"type": "text", "text": "\ud83d"},
]
ARGUMENTS = ["", "{}", '{"a": ', "[1]", "5", "null", {"a": 1}, None, '{"a": "\\ud83d"}', '{"\\ud83d": 1}']
CONTENT = st.sampled_from(["x", "", " ", None, QUESTION]) | st.lists(st.sampled_from(PARTS), max_size=3)
CALL = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["c", "", None, "c\ud83d"]),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.just("f"), "arguments": st.sampled_from(ARGUMENTS)}),
    }
)
TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "assistant", "tool", "system", "developer"]),
        "content": CONTENT,
    },
    optional={"tool_calls": st.lists(CALL, max_size=2), "tool_call_id": st.sampled_from(["c", "s"])},
)
ITEM = st.sampled_from(["function_call", "function_call_output", "reasoning", "message", None]).flatmap(
    lambda kind: st.fixed_dictionaries(
        {"type": st.just(kind)},
        optional={
            "role": st.sampled_from(["user", "assistant", "developer"]),
            "content": CONTENT,
            "call_id": st.sampled_from(["c", None]),
            "name": st.just("f"),
            "arguments": st.sampled_from(ARGUMENTS),
            "output": CONTENT,
        },
    )
)


@contextmanager
def serve(kind: str) -> Iterator[Served]:
    with ExitStack() as opened:
        model: Any = PacedChatModel(answer=answer_to_any)
        if kind != "chat model":
            upstream = opened.enter_context(chat_server())
            upstream.answer = answer_to_any
            url = upstream.url if kind == "openai" else upstream.anthropic_url
            model = make_provider(f"{kind}:{MODEL}", base_url=url)
        yield opened.enter_context(served(model, name="m"))


def bodies(route: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with a few fields of the schemas, some of them of another type, for a model that exists."""
    names = {name for schema in ROUTES[route] for name in get_type_hints(schema)}
    asked = "input" if "responses" in route else "messages"
    value = st.sampled_from(VALUES) | JSON
    question: Any = [{"role": "user", "content": QUESTION}]
    turns = st.lists(ITEM if asked == "input" else TURN, max_size=4).map(lambda some: [*some, *question])
    fixed = {"model": st.sampled_from(MODES), "stream": st.booleans()}
    others = st.lists(st.sampled_from(sorted(names - {"model", "stream", asked})), max_size=4, unique=True)
    return others.flatmap(
        lambda chosen: st.fixed_dictionaries(
            {**fixed, asked: st.just(question) | turns | value, **dict.fromkeys(chosen, value)}
        )
    )


@dataclass
class Told:
    """What a client is told: why an answer ended (``None`` if it did not) and its text."""

    ended: str | None
    text: str


def read(response: httpx.Response) -> Told:
    """Reads a reply on either route; whatever the protocol promises is there."""
    if response.status_code != 200:
        assert response.json()["error"]["message"], response.text
        return Told(None, "")
    if "text/event-stream" not in response.headers["content-type"]:
        return _read_whole(response.json())
    told, texts, has_error = Told(None, ""), [], False
    for line in response.text.split("\n"):
        if not line.startswith("data: {"):
            continue
        payload = json.loads(line.removeprefix("data: "))
        has_error = has_error or payload.get("type") == "error" or "error" in payload
        for choice in payload.get("choices", []):
            texts.append(choice["delta"].get("content") or "")
            told.ended = choice["finish_reason"] or told.ended
        if "usage" in payload:
            assert payload["usage"]["total_tokens"] > 0, response.text
        if payload.get("type") == "response.output_text.delta":
            texts.append(payload["delta"])
        if payload.get("type") in ("response.completed", "response.incomplete"):
            told.ended = _read_whole(payload["response"]).ended
    told.text = "".join(texts)
    assert (told.ended is None) == has_error, response.text
    return told


def _read_whole(body: dict[str, Any]) -> Told:
    assert body["usage"]["total_tokens"] > 0, body
    if "choices" in body:
        choice = body["choices"][0]
        return Told(choice["finish_reason"], choice["message"]["content"] or "")
    reason = (body["incomplete_details"] or {}).get("reason")
    text = "".join(part["text"] for item in body["output"] for part in item.get("content", []))
    return Told({"max_output_tokens": "length", None: "stop"}.get(reason, reason), text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_requests(route: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    until = time.monotonic() + SECONDS

    @settings(
        max_examples=200, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(bodies(route))
    def check(body: dict[str, Any]) -> None:
        if time.monotonic() > until:
            return
        sent = json.dumps(body)
        response = client.post(route, content=sent, headers={"content-type": "application/json"})
        assert response.status_code < 500, (sent, response.text)
        read(response)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR], sent

    with serve(kind) as running, httpx.Client(base_url=running.url, timeout=30) as client:
        while time.monotonic() < until:
            check()


async def test_replies() -> None:
    until = time.monotonic() + SECONDS
    first = 10_000
    while time.monotonic() < until:
        await survive(range(first, first + 50))
        first += 50


ENDINGS: dict[str, list[Any]] = {
    "stop": [
        "stop",
        "STOP",
        "end_turn",
        "eos",
        "eos_token",
        "stop_sequence",
        "COMPLETE",
        "FinishReason.STOP",
    ],
    "length": ["length", "max_tokens", "MAX_TOKENS", "model_length", "model_context_window_exceeded"],
    "content_filter": ["content_filter", "SAFETY", "refusal", "sensitive", "guardrail_intervened"],
    # What is not known, and breaks of all kinds.
    "": ["error", "abort", "network_error", "OTHER", "pause_turn", 7, {"type": "x"}, "timeout"],
}
BREAKS: list[bytes] = [
    b"",
    b'data: {"choices": [{"de\n\n',
    b'event: content_block_delta\ndata: {"a": "\xff\xfe"}\n\n',
    b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}\n\n',
    b'data: {"error": {"message": "it broke", "code": 502}}\n\n',
]
ODD_COUNTS: list[Any] = [
    *(None, {}, [], "x", 7, {"prompt_tokens": None, "completion_tokens": "3"}),
    {"prompt_tokens": 1e9, "completion_tokens": -5, "total_tokens": float("nan")},
    {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": None},
    {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": None},
]


def generate(random: Random, wire: str, text: str) -> tuple[Reply, str]:
    """A reply with ``text``, or half of it, and why it ends, in OpenAI's words; ``""`` for a failure."""
    ended = random.choice(list(ENDINGS))
    reason, is_broken = random.choice(ENDINGS[ended]), not ended and random.random() < 0.6
    units = text.encode("utf-16-le")
    places = sorted(random.choices(range(len(units) // 2 + 1), k=random.randint(0, 5)))
    ends = [*places, len(units) // 2]
    pieces = [
        units[2 * begin : 2 * end].decode("utf-16-le", "surrogatepass")
        for begin, end in zip([0, *places], ends, strict=True)
    ]
    if is_broken:
        pieces = pieces[: random.randint(0, len(pieces))]
    write = _openai if wire == "openai" else _anthropic
    sent = [event(one) for one in write(random, pieces, text, None if is_broken else reason)]
    if is_broken:
        return Reply([*sent, random.choice(BREAKS)], ends=random.random() < 0.5), ended
    done = wire == "openai" and random.random() < 0.7
    return Reply([*sent, b"data: [DONE]\n\n"] if done else sent), ended


def _openai(random: Random, pieces: list[str], text: str, reason: Any) -> list[Any]:
    payloads: list[Any] = []
    for piece in pieces:
        payloads.append(chunk(piece, random.choice([None, None, ""]), index=random.choice([0, None])))
        if random.random() < 0.3:
            payloads[-1]["usage"] = random.choice(ODD_COUNTS)
        noise = [
            chunk(None, None, index=1),
            {"choices": []},
            {"choices": [{"index": 0, "delta": None, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {"content": None, "role": None}}]},
            {"choices": [{"delta": {"reasoning_content": "hm"}, "index": 0}], "id": None, "created": None},
            {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "x"}}]}, "index": 0}]},
            {"choices": [{"delta": {"tool_calls": None, "refusal": None}, "index": 0}], "usage": None},
        ]
        payloads += random.sample(noise, k=random.choice([0, 0, 1, 2]))
    if reason is not None:
        last = chunk(None, reason)
        if random.random() < 0.2 and text.strip():
            last["choices"][0]["message"] = {"role": "assistant", "content": text}
        payloads.append(last)
        if random.random() < 0.5:
            payloads.append({"choices": [], "usage": random.choice(ODD_COUNTS)})
    return payloads


def _anthropic(random: Random, pieces: list[str], text: str, reason: Any) -> list[Any]:
    started: dict[str, Any] = {"type": "message_start", "message": {"usage": random.choice(ODD_COUNTS)}}
    payloads: list[Any] = [started] if random.random() < 0.9 else []
    for piece in pieces:
        payloads.append(text_delta(piece))
        noise = [
            {"type": "ping"},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}},
            {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
            {"type": "content_block_delta", "delta": None},
            {"type": "new_event", "text": 7},
        ]
        payloads += random.sample(noise, k=random.choice([0, 0, 1, 2]))
    if reason is not None:
        payloads.append({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {}})
        payloads += [{"type": "message_stop"}] if random.random() < 0.7 else []
    return payloads


@dataclass
class Upstream:
    """Answers as a seed says: the same for each attempt, and with a fault in one part of an answer alone."""

    wire: str
    seed: int = 0
    part: str = "plain"  # the part that has the fault
    ended: str = ""

    def begin(self, seed: int, part: str) -> None:
        self.seed, self.part = seed, part
        _, self.ended = generate(Random(seed), self.wire, self.text(part))

    def text(self, part: str) -> str:
        return " ".join(Random(self.seed).choices(WORDS, k=6)) + " End."

    def reply(self, request: dict[str, Any], number: int) -> Reply:
        part = what(messages := convert_to_messages(request["messages"]))
        if part != self.part:
            pieces = [chunk(answer_to(messages)), chunk(None, "stop")]
            if self.wire == "anthropic":
                ended = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
                pieces = [text_delta(answer_to(messages)), ended]
            return Reply([event(piece) for piece in pieces])
        made, _ = generate(Random(self.seed), self.wire, self.text(part))
        return replace(made, framing=Random(self.seed).choice(["chunked", "close"]))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("kind", ["openai", "anthropic", "langchain"])
def test_replies_behind_the_server(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retries, "pause_seconds", lambda *given: 0.0)
    until, seed = time.monotonic() + SECONDS, 0
    upstream = Upstream("anthropic" if kind == "anthropic" else "openai")
    with running_wire(upstream) as port:
        url = f"http://127.0.0.1:{port}" + ("/v1" if upstream.wire == "openai" else "")
        if kind == "langchain":
            model: Any = ChatOpenAI(model="x", base_url=url, api_key=SecretStr("k"), max_retries=0)
        else:
            model = make_provider(f"{kind}:x", base_url=url, api_key="k", prefill=False)
        with served(model, name="m") as running, httpx.Client(base_url=running.url, timeout=30) as client:
            while time.monotonic() < until:
                seed += 1
                _check_reply(client, upstream, Random(seed), seed, is_strict=kind != "langchain")
                errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
                assert not errors, (seed, errors[0].getMessage())


def _check_reply(
    client: httpx.Client, upstream: Upstream, random: Random, seed: int, *, is_strict: bool
) -> None:
    mode, route, stream = random.choice(["m", "m:sot"]), random.choice(list(ROUTES)), random.random() < 0.5
    upstream.begin(seed, random.choice(["Dark room", "Less coffee"]) if mode == "m:sot" else "plain")
    body: dict[str, Any] = {"model": mode, "stream": stream}
    body |= (
        {"input": QUESTION}
        if "responses" in route
        else {
            "messages": [{"role": "user", "content": QUESTION}],
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
    )
    response = client.post(route, json=body)
    told = read(response)
    note = (
        seed,
        upstream.wire,
        mode,
        route,
        stream,
        upstream.ended,
        response.status_code,
        response.text[-900:],
    )
    whole = upstream.text(upstream.part)
    if upstream.ended == "":
        assert told.ended != "stop", note
        assert response.status_code == 200 or not is_strict or response.status_code in (502, 529), note
    elif is_strict:
        assert (response.status_code, told.ended) == (200, upstream.ended), note
        if mode == "m":
            assert told.text == whole, note
    else:  # LangChain's own client may fail at odd values
        assert told.ended != "stop" or upstream.ended == "stop", note


@contextmanager
def running_wire(upstream: Upstream) -> Iterator[int]:
    """Runs the upstream in a thread with a loop of its own; yields its port."""
    ports: list[int] = []
    is_up = threading.Event()
    loop = asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def run() -> None:
        async with wire_server(upstream.reply) as server:
            ports.append(server.port)
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert is_up.wait(10)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(10)
        loop.close()
