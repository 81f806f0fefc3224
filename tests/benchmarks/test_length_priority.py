"""Predicted length as the priority of a request, on the wire of a real client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from benchmarks.length_priority import LengthPriority
from local_backend.scheduling.lengths import ObservedLengths

_USAGE = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}


class Server(ThreadingHTTPServer):
    """Speaks just as much of OpenAI's wire as the client reads, and keeps the bodies of requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.send_response(200)
        stream = bool(body.get("stream"))
        self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
        self.end_headers()
        head = {"id": "1", "created": 1, "model": "m", "object": "chat.completion"}
        if not stream:
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Yes."},
            }
            self.wfile.write(json.dumps({**head, "choices": [choice], "usage": _USAGE}).encode())
            return
        for choices, usage in (
            ([{"index": 0, "delta": {"role": "assistant", "content": "Yes"}}], None),
            ([{"index": 0, "delta": {"content": "."}, "finish_reason": "stop"}], None),
            ([], _USAGE),
        ):
            event = {**head, "object": "chat.completion.chunk", "choices": choices, "usage": usage}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def chat(server: Server, **options: Any) -> ChatOpenAI:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return ChatOpenAI(base_url=url, api_key=SecretStr("none"), model="m", stream_usage=True, **options)


async def test_every_call_has_a_priority_and_is_learned_from(server: Server) -> None:
    lengths = ObservedLengths(min_answers=4)
    model = LengthPriority(model=chat(server), predictor=lengths)
    assert model.invoke("Is it?").text == "Yes."
    assert (await model.ainvoke("Is it?")).text == "Yes."
    assert [chunk.text for chunk in model.stream("Is it?") if chunk.text] == ["Yes", "."]
    assert [chunk.text async for chunk in model.astream("Is it?") if chunk.text] == ["Yes", "."]
    assert all(isinstance(body["priority"], int) for body in server.bodies)
    prediction = lengths.predict([model.encode("human: Is it?")])[0]
    assert prediction is not None
    assert prediction.num_tokens == 7


def test_what_else_the_body_holds_is_kept(server: Server) -> None:
    model = LengthPriority(model=chat(server, extra_body={"min_p": 0.1}))
    model.invoke("Is it?", extra_body={"top_k": 3})
    assert server.bodies[0]["min_p"] == 0.1
    assert server.bodies[0]["top_k"] == 3
    model.invoke("Is it?", extra_body={"priority": 5})
    assert server.bodies[1]["priority"] == 5


def test_shorter_answers_come_first_but_not_for_ever(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = ObservedLengths(min_answers=1)
    model = LengthPriority(model=chat(server), predictor=lengths, tokens_per_second=10, stretch=5)
    short, long = "Answer yes or no: is it?", "Write an essay on tea."
    lengths.observe(model.encode(f"human: {short}"), 2)
    lengths.observe(model.encode(f"human: {long}"), 400)
    now = 1e9
    monkeypatch.setattr("time.time", lambda: now)
    first = model.priority(long)
    assert model.priority(short) < first
    now += 5 * 400 / 10  # whoever comes so much later cannot overtake it
    assert model.priority(short) > first
    assert model.priority(long, max_tokens=2) < model.priority(long)
