"""Requests of wrong types and odd values: each gets an answer or a reason, and none breaks the server."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage

from sot_chains.providers import make_provider
from sot_chains.serving.schema import ChatRequest
from tests.sot_chains.fakes import PLAIN, QUESTION, PacedChatModel, answer_to
from tests.sot_chains.server import MODEL, chat_server
from tests.sot_chains.serving.running import Served, served

ASKED: Any = [{"role": "user", "content": QUESTION}]
BODY: dict[str, Any] = {"model": "paced", "messages": ASKED}


def answer_to_any(messages: Sequence[BaseMessage]) -> str:
    return answer_to(messages) if any(message.type == "human" for message in messages) else PLAIN


@pytest.fixture(scope="module", params=["chat model", "vendor"])
def running(request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == "chat model":
        with served(PacedChatModel(answer=answer_to_any)) as one:
            yield one
        return
    with chat_server() as upstream:
        upstream.answer = answer_to_any
        model = make_provider(f"openai:{MODEL}", base_url=upstream.url)
        with served(model, name="paced") as one:
            yield one


@pytest.fixture(scope="module")
def client(running: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=20) as one:
        yield one


def _refused(response: httpx.Response) -> str:
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return str(error["param"])


# What each field is not.
WRONG: dict[str, list[Any]] = {
    "model": [None, 1, [], {}, True, "", "paced:", "PACED", "paced:sot:sot", "../paced", "\x00"],
    "messages": [None, 1, "x", {}, [], [None], [[]], ["x"], [{}], [{"role": "user"}], [{"content": "x"}]],
    "stream": ["true", 1, [], {}, "x"],
    "stream_options": [1, "x", [], True, {"include_usage": "x"}],
    "n": [0, -1, 2, 10**30, "1", True, 1.5, []],
    "stop": [0, False, {}, [1], [None], [["x"]], ["x"] * 17],
    "max_tokens": [0, -1, 1.5, "5", True, [], 10**30],
    "max_completion_tokens": [0, -1, 1.5, "5", True, {}, 10**30],
    "temperature": [-0.1, 2.1, "0.5", True, [], float("nan"), float("inf"), 10**400],
    "top_p": [0, -1, 1.1, "1", True, float("nan")],
    "presence_penalty": ["x", 3, True, float("nan")],
    "frequency_penalty": [[], -3, float("-inf")],
    "seed": ["1", 1.5, True, 10**30, []],
    "logit_bias": [[], "x", {"1": "x"}, {"1": True}, 5],
    "tools": [0, False, "x", {}, [1], ["x"]],
    "tool_choice": [0, "x", [], True],
    "parallel_tool_calls": ["x", 1, []],
    "response_format": ["json", [], 1, True],
    "references": [0, "", "x", {}, False, [1], [None], [{}], [{"text": 5}], [{"text": "x", "url": 5}]],
    "logprobs": [True, "x", {}],
    "modalities": [["audio"], "text", 1],
    "functions": [[{"name": "f"}], "x", {}],
    "function_call": ["required", {"name": "f"}, 1],
}
ODD = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), ODD, ids=[f"{name}-{i}" for i, (name, _) in enumerate(ODD)])
def test_a_field_of_the_wrong_type_is_refused_by_its_name(
    client: httpx.Client, name: str, value: Any
) -> None:
    for stream in (False, True):
        body = {**BODY, "stream": stream, name: value}
        param = _refused(client.post("/v1/chat/completions", content=json.dumps(body)))
        assert param.split(".")[0] == name


@pytest.mark.parametrize(
    "name", ["config", "input", "self", "prefix", "resume", "deadline_seconds", "extra_headers", "timeout"]
)
@pytest.mark.parametrize("way", ["paced", "paced:sot"])
def test_arguments_of_python_calls_are_no_fields(client: httpx.Client, name: str, way: str) -> None:
    for value in (5, None, {}, {"callbacks": ["x"]}):
        response = client.post("/v1/chat/completions", json={**BODY, "model": way, name: value})
        assert _refused(response) == name


ROLES = ["user", "assistant", "system", "tool", "function", "developer", "", "USER", 5, None]
PARTS: list[Any] = [
    *(
        {"type": "image_url", "image_url": 5},
        {"type": "image_url"},
        {"type": ""},
        {"type": None},
        {},
        5,
        None,
    ),
    *({"type": "text"}, {"type": "text", "text": 5}, {"type": "text", "text": None}, "x", ["x"]),
]


@pytest.mark.parametrize("way", ["paced", "paced:sot", "paced:auto"])
def test_messages_of_any_shape_are_answered_or_refused(client: httpx.Client, way: str) -> None:
    shapes: list[Any] = [{"role": role, "content": "x"} for role in ROLES]
    shapes += [{"role": "user", "content": [part]} for part in PARTS]
    shapes += [{"role": "user", "content": content} for content in (None, [], 5, {}, True, [[]], "")]
    shapes += [{"role": "assistant", "tool_calls": calls} for calls in ([], [5], [{}], {}, "x", None)]
    shapes += [{"role": "tool", "content": "x", "tool_call_id": one} for one in (5, None, [])]
    shapes += [{"role": "user", "content": "x", "name": one} for one in (5, [], "me")]
    shapes += [{"role": "user", "content": "x", "id": 5}, {"role": "user", "content": "x", "type": "ai"}]
    shapes += [{"role": "user", "content": "x", "additional_kwargs": 5}, {"type": "human"}]
    for shape in shapes:
        for messages in ([shape], [shape, *ASKED]):
            body = {"model": way, "messages": messages}
            response = client.post("/v1/chat/completions", json=body)
            if response.status_code != 200:
                _refused(response)


def test_bytes_that_are_no_text_are_refused(client: httpx.Client) -> None:
    whole = json.dumps(BODY)
    for content in (
        whole.encode("utf-16"),
        whole.replace("sleep", "sl\xffeep").encode("latin-1"),
        whole.encode() + b"}",
        whole.encode() + b"\x00",
        whole[:-1].encode(),
        b"model=paced&messages=x",
        b"\x1f\x8b\x08\x00" + whole.encode(),
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        (whole[:-1] + ', "x": ' + "[" * 5000 + "]" * 5000 + "}").encode(),
    ):
        for path in ("/v1/chat/completions", "/race"):
            _refused(client.post(path, content=content))


def test_a_request_that_is_no_http_ends_the_connection_alone(running: Served) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    for request in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        head + b"content-length: -5\r\n\r\n",
        head + b"content-length: five\r\n\r\n",
        head + b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        head + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        head + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as connection:
            connection.settimeout(10)
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431")
            except OSError as error:  # closed on what was still being sent (ENOTCONN, says shutdown)
                if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                    raise
    assert httpx.get(f"{running.url}/health").status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(sorted({*ChatRequest.model_fields, "logprobs", "user", "grammar", "x"} - {"stream"}))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(FIELDS, JSON, max_size=3), st.sampled_from(["paced", "paced:sot", "paced:auto"]))
def test_any_json_is_answered_or_refused(client: httpx.Client, fields: dict[str, Any], way: str) -> None:
    body = json.dumps({**BODY, "model": way, **fields})
    response = client.post("/v1/chat/completions", content=body)
    if response.status_code != 200:
        _refused(response)
