"""Who may ask what: keys, sizes, hosts and paths; and readers that go."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from local_backend import ChatLocal
from sot_chains.providers import make_provider
from tests.sot_chains.fakes import ANSWER, QUESTION, PacedChatModel
from tests.sot_chains.server import MODEL, chat_server
from tests.sot_chains.serving.running import Served, served, within

ASKED: Any = [{"role": "user", "content": QUESTION}]
BODY: dict[str, Any] = {"model": "paced:sot", "messages": ASKED}


def _error(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def test_without_the_key_only_the_page_is_given() -> None:
    with served(PacedChatModel(), api_key="sesame-ünicode") as running:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame"}):
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                response = httpx.get(running.url + path, headers=headers)
                assert response.status_code == 401, path
                assert "API key" in _error(response)
            for path in ("/v1/chat/completions", "/race"):
                assert httpx.post(running.url + path, json=BODY, headers=headers).status_code == 401
        for path in ("/", "/health", "/style.css", "/race.js", "/race.css", "/about"):
            assert httpx.get(running.url + path).status_code == 200, path
        right = {"authorization": "Bearer sesame-ünicode".encode()}
        answered = httpx.post(f"{running.api}/chat/completions", json=BODY, headers=right)
        assert answered.json()["choices"][0]["message"]["content"] == ANSWER


def test_another_site_cannot_ask_and_names_of_others_are_not_ours() -> None:
    with served(PacedChatModel()) as running:
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"host": "evil.example"},
            {"host": "127.0.0.1.evil.example"},
        ):
            response = httpx.post(f"{running.api}/chat/completions", json=BODY, headers=headers)
            assert response.status_code == 403
            assert _error(response)
            assert "access-control-allow-origin" not in response.headers
        for headers in ({"origin": running.url}, {"host": "localhost:1"}, {"host": "[::1]:8000"}):
            response = httpx.post(f"{running.api}/chat/completions", json=BODY, headers=headers)
            assert response.status_code == 200, headers


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_giant_body_is_refused_and_not_kept(is_chunked: bool) -> None:
    with served(PacedChatModel(), max_body_bytes=100_000) as running:
        content = (b" " * 65_536 for _ in range(200)) if is_chunked else b" " * 13_000_000
        response = httpx.post(f"{running.api}/chat/completions", content=content, timeout=20)
        assert response.status_code == 413
        assert "100000 bytes" in _error(response)


BODIES = [
    *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "paced", "messages": "x"}'),
    *(b"[" * 100_000, b'{"model": ' + b"[" * 50_000, b'{"model": "paced", "messages": [1]}'),
    b'{"model": "paced", "messages": [{"role": "user", "content": "\\ud83d"}], "temperature": NaN}',
    b'{"model": "paced", "messages": [{"role": "user", "content": "x"}], "output_config": {"a": NaN}}',
    b'{"model": "paced", "messages": [{"role": "user", "content": "x"}], "top_k": 1e999}',
    b'{"model": {"a": 1}, "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "paced", "messages": [{"role": "assistant", "tool_calls": 5}]}',
    b'{"model": "paced", "messages": [{"role": "user", "content": [{"type": 5}]}]}',
]


@pytest.fixture(scope="module")
def running() -> Any:
    with served(PacedChatModel()) as one:
        yield one


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/race"])
def test_a_body_that_is_no_request_gets_a_reason(running: Served, body: bytes, path: str) -> None:
    response = httpx.post(running.url + path, content=body)
    assert 400 <= response.status_code < 500
    assert _error(response)


@pytest.mark.parametrize(
    "path",
    [
        *("/../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/race.html", "/race.html", "/static/race.js"),
        *(
            "/runs/../race.js.html",
            "/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd.html",
            "/runs/x.html",
            "//etc/passwd",
        ),
        *("/v1/models/../../etc", "/v1/models/other", "/v1/completions", "/docs", "/redoc", "/%00"),
    ],
)
def test_a_path_that_is_none_is_not_found(running: Served, path: str) -> None:
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        head, _, body = b"".join(iter(lambda: connection.recv(65_536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404")
    assert json.loads(body)["error"]["message"]


def test_a_method_that_is_none_is_refused(running: Served) -> None:
    response = httpx.get(f"{running.api}/chat/completions")
    assert response.status_code == 405
    assert _error(response)


def test_metrics_count_what_was_answered(running: Served) -> None:
    httpx.post(f"{running.api}/chat/completions", json=BODY)
    httpx.post(f"{running.api}/chat/completions", json={**BODY, "n": 2})
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['sot_requests_total{model="paced:sot",status="200"}']) >= 1
    assert float(values['sot_requests_total{model="",status="400"}']) >= 1
    assert float(values['sot_tokens_total{kind="output",model="paced:sot"}']) >= 21
    assert float(values['sot_model_calls_total{model="paced:sot"}']) >= 4
    assert values["sot_requests_running"] == "0.0"


def test_a_clients_own_key_is_passed_on_where_the_server_has_none() -> None:
    with chat_server() as upstream:
        upstream.key = "right"

        def model_of(key: str) -> Any:
            return make_provider(f"openai:{MODEL}", base_url=upstream.url, api_key=key)

        model = make_provider(f"openai:{MODEL}", base_url=upstream.url)
        with served(model, model_for_key=model_of) as running:
            for key, status in (("right", 200), ("wrong", 401)):
                headers = {"authorization": f"Bearer {key}"}
                body = {"model": f"{MODEL}:sot", "messages": ASKED}
                response = httpx.post(f"{running.api}/chat/completions", json=body, headers=headers)
                assert response.status_code == status
            assert "refuses the API key" in _error(response)
            assert httpx.post(f"{running.api}/chat/completions", json=body).status_code == 401
        assert set(upstream.keys) == {"right", "wrong"}


def test_what_the_vendor_refuses_is_refused_with_its_status() -> None:
    with chat_server() as upstream:
        model = make_provider("openai:unknown", base_url=upstream.url)
        with served(model) as running, openai.OpenAI(base_url=running.api, api_key="x") as client:
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.chat.completions.create(model="unknown:sot", messages=ASKED)
            tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
            with pytest.raises(openai.BadRequestError, match="tools are not supported"):
                client.chat.completions.create(model="unknown", messages=ASKED, tools=[tool])


def _leave_in_the_middle(running: Served, path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])))
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    if body.get("stream") or path == "/race":
        connection.recv(2000)
    connection.close()


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**BODY, "stream": True}),
    ("/v1/chat/completions", {**BODY, "model": "paced", "stream": True}),
    ("/v1/chat/completions", BODY),
    ("/race", {"question": QUESTION}),
]


@pytest.mark.parametrize("rounds", [13, pytest.param(100, marks=pytest.mark.slow)])
def test_readers_that_go_leave_nothing_running(rounds: int) -> None:
    model = PacedChatModel(pause=0.02)
    with served(model) as running:
        for _ in range(rounds):
            for path, body in KINDS:
                _leave_in_the_middle(running, path, body)
        assert within(10, lambda: model.num_running == 0 and running.is_idle())
        assert len(model.requests) >= rounds
        lines = httpx.get(f"{running.url}/metrics").text
        assert 'sot_requests_total{model="paced:sot",status="499"}' in lines
        assert "sot_requests_running 0.0" in lines


@pytest.mark.slow
def test_readers_that_go_end_the_rows_of_the_default_model(default_chat: ChatLocal) -> None:
    name = default_chat.model_name
    with served(default_chat) as running:
        for path, body in KINDS:
            names = {"paced": name, "paced:sot": f"{name}:sot"}
            _leave_in_the_middle(running, path, {**body, "model": names.get(body.get("model", ""), "")})
        assert within(30, lambda: default_chat.engine.num_rows == 0 and running.is_idle())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with served(PacedChatModel(), client_timeout_seconds=0.2) as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as connection:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
            connection.sendall(head)
            connection.settimeout(10)
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
        assert within(10, running.is_idle)


def test_a_reader_that_does_not_read_ends_what_runs_for_it() -> None:
    endless = PacedChatModel(answer=lambda messages: ("x" * 20_000 + " ") * 2_000, pause=0.02)  # > 40 s
    with served(endless, client_timeout_seconds=0.3) as running:
        data = json.dumps({**BODY, "model": "paced", "stream": True}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            assert within(10, lambda: len(endless.requests) > 0)
            assert within(20, lambda: endless.num_running == 0)
