"""Requests over the schemas of OpenAI and Anthropic, and replies in all forms: ``make fuzz``.

Every request gets an answer, or an error that says why; every reply is whole, marked as partial, or one clear
error. The file's name keeps it out of other runs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from tests.sot_chains.fakes import QUESTION, PacedChatModel
from tests.sot_chains.providers.test_fuzz import survive
from tests.sot_chains.serving.running import Served, served
from tests.sot_chains.serving.test_odd_requests import answer_to_any

SECONDS = float(os.environ.get("FUZZ_SECONDS", "600")) / 3
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
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**63,
        0.5,
        1e308,
        "",
        "auto",
        "none",
        "required",
        "text",
        "\ud83d",
        [],
        {},
    ),
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


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with served(PacedChatModel(answer=answer_to_any)) as one:
        yield one


def bodies(route: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with a few fields of the schemas, some of them of another type, for a model that exists."""
    names = {name for schema in ROUTES[route] for name in get_type_hints(schema)}
    asked = "input" if "responses" in route else "messages"
    value = st.sampled_from(VALUES) | JSON
    question: Any = st.just(QUESTION if asked == "input" else [{"role": "user", "content": QUESTION}])
    fixed = {"model": st.sampled_from(["paced", "paced:sot", "paced:auto"]), "stream": st.booleans()}
    others = st.lists(st.sampled_from(sorted(names - {"model", "stream", asked})), max_size=4, unique=True)
    return others.flatmap(
        lambda chosen: st.fixed_dictionaries(
            {**fixed, asked: question | value, **dict.fromkeys(chosen, value)}
        )
    )


@pytest.mark.parametrize("route", ROUTES)
def test_requests(route: str, running: Served, caplog: pytest.LogCaptureFixture) -> None:
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
        assert response.status_code == 200 or response.json()["error"]["message"], (sent, response.text)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR], sent

    with httpx.Client(base_url=running.url, timeout=30) as client:
        while time.monotonic() < until:
            check()


async def test_replies() -> None:
    until = time.monotonic() + SECONDS
    first = 10_000
    while time.monotonic() < until:
        await survive(range(first, first + 50))
        first += 50
