"""The clients that people have, over a real socket: OpenAI's, LangChain's, LiteLLM and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

import retrieval_copy
from sot_chains.serving import Copying
from tests.sot_chains.fakes import ANSWER, OUTLINE, PLAIN, QUESTION, PacedChatModel, is_skeleton_request
from tests.sot_chains.serving.models import ToolChatModel
from tests.sot_chains.serving.running import Served, served

ASKED: Any = [{"role": "user", "content": QUESTION}]
MODELS = ["paced", "paced:sot", "paced:auto"]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def upstream() -> PacedChatModel:
    return PacedChatModel()


@pytest.fixture(scope="module")
def server(upstream: PacedChatModel) -> Iterator[Served]:
    with served(upstream, copying=Copying(partial(retrieval_copy.cite, min_tokens=5))) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as opened:
        yield opened


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == MODELS
    assert client.models.retrieve("paced:sot").owned_by == "sot"


@pytest.mark.parametrize(("model_name", "text"), [*zip(MODELS, [PLAIN, ANSWER, ANSWER], strict=True)])
def test_whole_and_streamed_are_the_same(client: openai.OpenAI, model_name: str, text: str) -> None:
    whole = client.chat.completions.create(model=model_name, messages=ASKED)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model_name, messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage
    assert whole.usage.total_tokens > 0
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.model for chunk in chunks} == {model_name}


async def test_asynchronously_and_without_usage_unless_asked_for(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=server.api, api_key="none") as client:
        whole = await client.chat.completions.create(model="paced:sot", messages=ASKED)
        assert whole.choices[0].message.content == ANSWER
        assert whole.model_extra
        assert whole.model_extra["sot"]["skeleton"] == ["Fixed hours", "Dark room", "Less coffee"]
        stream = await client.chat.completions.create(model="paced", messages=ASKED, stream=True)
        chunks = [chunk async for chunk in stream]
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings_and_bounds_end_the_whole_text(client: openai.OpenAI, streams: bool) -> None:
    def ask(**options: Any) -> tuple[str, str]:
        if not streams:
            choice = client.chat.completions.create(model="paced:sot", messages=ASKED, **options).choices[0]
            return choice.message.content or "", choice.finish_reason
        text = reason = ""
        for chunk in client.chat.completions.create(
            model="paced:sot", messages=ASKED, stream=True, **options
        ):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    assert ask(stop="\n\n3.") == (ANSWER.split("\n\n3.", maxsplit=1)[0], "stop")
    assert ask(stop=["curtains", "never"]) == (ANSWER.split("curtains", maxsplit=1)[0], "stop")
    assert ask(max_tokens=1000) == (ANSWER, "stop")
    # Too few tokens for points: the model answers plainly, and is told.
    assert ask(max_completion_tokens=5)[0] == PLAIN


def test_a_long_answer_ends_at_its_bound() -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        return OUTLINE if is_skeleton_request(str(messages[-1].text)) else numbers

    numbers = " ".join(map(str, range(400)))  # in no order that repeats, which would be taken for a loop
    with (
        served(PacedChatModel(answer=answer)) as running,
        openai.OpenAI(base_url=running.api, api_key="none") as client,
    ):
        answered = client.chat.completions.create(model="paced:sot", messages=ASKED, max_tokens=200)
    assert answered.choices[0].finish_reason == "length"
    assert 100 < len((answered.choices[0].message.content or "").split()) < 300


def test_parameters_reach_every_call(client: openai.OpenAI, upstream: PacedChatModel) -> None:
    upstream.parameters.clear()
    client.chat.completions.create(model="paced:sot", messages=ASKED, temperature=0.7, seed=3, user="me")
    assert [(one["temperature"], one["seed"]) for one in upstream.parameters] == [(0.7, 3)] * 4
    assert not any("user" in one or "max_tokens" in one for one in upstream.parameters)
    client.chat.completions.create(model="paced", messages=ASKED, max_tokens=7, stop="x")
    assert (upstream.parameters[-1]["max_tokens"], upstream.parameters[-1]["stop"]) == (7, ["x"])
    client.chat.completions.create(model="paced", messages=ASKED, response_format={"type": "json_object"})
    assert upstream.parameters[-1]["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize("streams", [False, True])
def test_references_are_cited(client: openai.OpenAI, streams: bool) -> None:
    references = [
        "Nothing of this.",
        {"text": "Some say: go to bed at the same time. Others do not.", "title": "Sleep", "url": "http://s"},
    ]
    options: Any = {"model": "paced:sot", "messages": ASKED, "extra_body": {"references": references}}
    if streams:
        *_, last, _ = client.chat.completions.create(stream=True, **options)
        annotations = (last.choices[0].delta.model_extra or {})["annotations"]
    else:
        message = client.chat.completions.create(**options).choices[0].message
        annotations = [one.model_dump() for one in message.annotations or []]
    (citation,) = [one["url_citation"] for one in annotations]
    assert (citation["title"], citation["url"], citation["document"]) == ("Sleep", "http://s", 1)
    cited = ANSWER[citation["start_index"] : citation["end_index"]]
    assert cited.lower() == citation["cited_text"].lower()
    assert "bed at the same time" in cited


DOCUMENTS: Any = [
    "Rye.",
    {"text": "Wheat.", "title": "Flour", "url": "http://f"},  # vLLM's form; the others are Cohere's
    {"snippet": "Salt.", "title": "Kitchen"},
    {"id": "doc-1", "data": "Water."},
    {"id": "doc-2", "data": {"text": "Yeast.", "title": "Named"}},
    {"id": "doc-3", "data": {"snippet": "Heat."}},
]


@pytest.mark.parametrize("mode", ["paced", "paced:sot"])
def test_documents_come_in_any_form_and_reach_every_call(
    client: openai.OpenAI, upstream: PacedChatModel, mode: str
) -> None:
    upstream.parameters.clear()
    said = {"title": "Sleep", "text": f"{PLAIN} {ANSWER}"}
    body = {"documents": [*DOCUMENTS, said], "references": ["Nothing of this."]}
    reply = client.chat.completions.create(model=mode, messages=ASKED, extra_body=body)
    texts = ["Rye.", "Wheat.", "Salt.", "Water.", "Yeast.", "Heat.", said["text"]]
    titles = [None, "Flour", "Kitchen", "doc-1", "Named", "doc-3", "Sleep"]
    assert upstream.parameters
    for parameters in upstream.parameters:
        shown = parameters["documents"]
        assert [one["text"] for one in shown] == texts
        assert [one.get("title") for one in shown] == titles
        assert shown[1]["url"] == "http://f"
        assert "references" not in parameters
    cited = [one.url_citation for one in reply.choices[0].message.annotations or []]
    assert {one.title for one in cited} == {"Sleep"}
    upstream.parameters.clear()
    client.chat.completions.create(model=mode, messages=ASKED, extra_body={"documents": []})
    assert not any("documents" in parameters for parameters in upstream.parameters)


def test_tools_are_passed_to_a_model_that_takes_them() -> None:
    with served(ToolChatModel()) as running, openai.OpenAI(base_url=running.api, api_key="x") as client:
        whole = client.chat.completions.create(
            model="paced:auto", messages=ASKED, tools=[TOOL], tool_choice="required"
        )
        (call,) = whole.choices[0].message.tool_calls or []
        assert whole.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"city": "Köln"}  # type: ignore[union-attr]  # a call
        stream = client.chat.completions.create(model="paced", messages=ASKED, tools=[TOOL], stream=True)
        pieces = [chunk.choices[0].delta.tool_calls or [] for chunk in stream]
        arguments = "".join(one.function.arguments or "" for piece in pieces for one in piece if one.function)
        assert json.loads(arguments) == {"city": "Köln"}
        turns = [
            *ASKED,
            whole.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "Rain"},
        ]
        answered = client.chat.completions.create(model="paced", messages=turns, tools=[TOOL])
        assert answered.choices[0].message.content == PLAIN
        with pytest.raises(openai.BadRequestError, match="use the model paced, not paced:sot"):
            client.chat.completions.create(model="paced:sot", messages=ASKED, tools=[TOOL])


REFUSED: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"model": "other"}, openai.NotFoundError, "available are paced, paced:sot"),
    ({"n": 2}, openai.BadRequestError, "n: Input should be less"),
    ({"temperature": 3}, openai.BadRequestError, "temperature"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"stop": 3}, openai.BadRequestError, "stop"),
    ({"logprobs": True}, openai.BadRequestError, "logprobs"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "messages"),
    ({"messages": [{"content": "x"}]}, openai.BadRequestError, "role"),
    ({"messages": [{"role": "user", "content": None}]}, openai.BadRequestError, "content"),
    ({"messages": [{"role": "user", "content": 7}]}, openai.BadRequestError, "content"),
    ({"model": "paced:sot", "messages": [{"role": "user", "content": " "}]}, openai.BadRequestError, "empty"),
    (
        {"model": "paced:sot", "messages": [{"role": "system", "content": "x"}]},
        openai.BadRequestError,
        "question",
    ),
    ({"model": "paced:sot", "response_format": {"type": "json_object"}}, openai.BadRequestError, "one piece"),
    ({"tools": [TOOL]}, openai.BadRequestError, "tools"),
    ({"extra_body": {"references": 5}}, openai.BadRequestError, "references"),
    ({"extra_body": {"references": [5]}}, openai.BadRequestError, "references"),
    ({"extra_body": {"documents": [{"title": "no text"}]}}, openai.BadRequestError, "documents.0.text"),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("request_", "error", "says"), REFUSED)
def test_what_cannot_be_answered_is_refused_with_a_reason(
    client: openai.OpenAI,
    request_: dict[str, Any],
    error: type[openai.APIStatusError],
    says: str,
    streams: bool,
) -> None:
    with pytest.raises(error, match=says) as refused:
        client.chat.completions.create(**{"model": "paced", "messages": ASKED, "stream": streams, **request_})
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "invalid_request_error"


def test_a_model_that_breaks_is_an_error_in_the_stream_and_before_it() -> None:
    with (
        served(PacedChatModel(fail=lambda messages: True)) as running,
        openai.OpenAI(base_url=running.api, api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="the model broke"):
            client.chat.completions.create(model="paced", messages=ASKED)
        stream = client.chat.completions.create(model="paced", messages=ASKED, stream=True)
        with pytest.raises(openai.APIError, match="the model broke"):
            list(stream)
        assert client.models.list()  # it goes on


def test_a_chat_model_of_langchain_stands_in_a_chain(server: Served) -> None:
    chat = ChatOpenAI(model="paced:sot", base_url=server.api, api_key="none")  # type: ignore[arg-type]  # a text is taken
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | chat | StrOutputParser()
    assert chain.invoke({"question": QUESTION}) == ANSWER
    assert "".join(chain.stream({"question": QUESTION})) == ANSWER


class TestChatOpenAI(ChatModelIntegrationTests):
    """LangChain's suite for the client of OpenAI, with our server for OpenAI's.

    The model behind it is a script that writes text, so what asks for tools, JSON or images stays off.
    """

    @pytest.fixture(autouse=True)
    async def _server(self, server: Served) -> AsyncIterator[None]:
        # ChatOpenAI keeps one client for all event loops, and leaves its sockets open when a loop ends.
        async with openai.DefaultAsyncHttpxClient() as self.http_client:
            self.api = server.api
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            **{"model": "paced:auto", "base_url": self.api, "api_key": "none", "stream_usage": True},
            "http_async_client": self.http_client,
        }

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "paced:sot"

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


_LITELLM = """
import sys, litellm
url, asked = sys.argv[1], [{"role": "user", "content": sys.argv[2]}]
options = {"model": "openai/paced:sot", "api_base": url, "api_key": "none", "messages": asked}
print(litellm.completion(**options).choices[0].message.content)
print("---")
print("".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True)))
"""


@pytest.mark.slow
def test_litellm(server: Served) -> None:
    """In a process of its own: importing it takes long, and warns."""
    pytest.importorskip("importlib.metadata").version("litellm")
    command = [sys.executable, "-c", _LITELLM, server.api, QUESTION]
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=local)
    assert done.stdout == f"{ANSWER}\n---\n{ANSWER}\n", done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here: apt-get install curl")
def test_curl(server: Served) -> None:
    body = json.dumps({"model": "paced:sot", "messages": ASKED, "stream": True})
    command = ["curl", "-sN", f"{server.api}/chat/completions", "-H", "content-type: application/json"]
    done = subprocess.run([*command, "-d", body], capture_output=True, text=True, timeout=20, check=True)
    events = done.stdout.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER


def test_a_plain_answer_that_was_decided_on_ends_where_it_goes_round() -> None:
    again = "one two three four five six seven eight nine " * 50
    with (
        served(PacedChatModel(answer=lambda messages: again), profile="small") as running,
        openai.OpenAI(base_url=running.api, api_key="none") as client,
    ):
        asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
        decided = client.chat.completions.create(model="paced:auto", messages=asked)
        assert len(decided.choices[0].message.content or "") < 300
        assert (decided.model_extra or {})["sot"]["route"] == "plain"
        itself = client.chat.completions.create(model="paced", messages=asked)
        assert itself.choices[0].message.content == again
