"""OpenAI's newer protocol, through OpenAI's client and LangChain's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

import retrieval_copy
from sot_chains.serving import Copying
from tests.sot_chains.fakes import ANSWER, PLAIN, QUESTION, PacedChatModel
from tests.sot_chains.serving.models import ToolChatModel
from tests.sot_chains.serving.running import Served, served

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(PacedChatModel(), copying=Copying(partial(retrieval_copy.cite, min_tokens=5))) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize(("model", "text"), [("paced", PLAIN), ("paced:sot", ANSWER), ("paced:auto", ANSWER)])
def test_whole_and_streamed_are_the_same(client: openai.OpenAI, model: str, text: str) -> None:
    whole = client.responses.create(model=model, input=QUESTION, instructions="Be brief.")
    assert (whole.output_text, whole.status, whole.model) == (text, "completed", model)
    assert whole.usage
    assert whole.usage.total_tokens > 0
    with client.responses.stream(model=model, input=QUESTION, instructions="Be brief.") as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert (last.output_text, last.usage) == (text, whole.usage)
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == text
    kinds = [one.type for one in events if one.type != "response.output_text.delta"]
    assert kinds == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]


def test_a_conversation_is_read_and_what_is_written_is_bounded(client: openai.OpenAI) -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello!"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    assert client.responses.create(model="paced:sot", input=turns).output_text == ANSWER
    short = client.responses.create(model="paced:sot", input=turns, max_output_tokens=5, store=False)
    assert short.output_text == PLAIN


@pytest.mark.parametrize("streams", [False, True])
def test_references_are_cited(client: openai.OpenAI, streams: bool) -> None:
    body = {"references": [{"text": "Go to bed at the same time.", "title": "Sleep", "url": "http://s"}]}
    asked: Any = {"model": "paced:sot", "input": QUESTION, "extra_body": body}
    if streams:
        *_, last = client.responses.create(**asked, stream=True)
        answered = last.response  # type: ignore[union-attr]  # the last event has it
    else:
        answered = client.responses.create(**asked)
    (annotation,) = answered.output[0].content[0].annotations
    assert (annotation.title, annotation.url) == ("Sleep", "http://s")
    cited = ANSWER[annotation.start_index : annotation.end_index]
    assert cited.lower() == annotation.cited_text.lower()


def test_tools_are_called_and_told_of() -> None:
    with served(ToolChatModel()) as running, openai.OpenAI(base_url=running.api, api_key="x") as client:
        whole = client.responses.create(model="paced:auto", input=QUESTION, tools=[TOOL])
        (call,) = whole.output
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Köln"}
        with client.responses.stream(model="paced", input=QUESTION, tools=[TOOL]) as stream:
            *_, last = list(stream)
        assert last.type == "response.completed"
        streamed = last.response.output[-1]
        assert streamed.type == "function_call"
        assert (streamed.name, json.loads(streamed.arguments)) == ("weather", {"city": "Köln"})
        turns: Any = [
            {"role": "user", "content": QUESTION},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"},
        ]
        assert client.responses.create(model="paced", input=turns, tools=[TOOL]).output_text == PLAIN


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": []}]}, "is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "right type"),
        ({"previous_response_id": "resp_1"}, "keeps no state"),
        ({"background": True}, "keeps no state"),
        ({"max_output_tokens": 0}, "max_completion_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": 5}, "tools"),
        ({"text": 5}, "text"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"model": "other"}, "does not exist"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_what_cannot_be_answered_is_refused(
    client: openai.OpenAI, asked: dict[str, Any], says: str, streams: bool
) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=says):
        client.responses.create(**{"model": "paced", "input": QUESTION, "stream": streams, **asked})


def test_a_model_that_breaks_is_an_error_in_the_stream() -> None:
    with (
        served(PacedChatModel(fail=lambda messages: True)) as running,
        openai.OpenAI(base_url=running.api, api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="the model broke"):
            client.responses.create(model="paced", input=QUESTION)
        *_, last = client.responses.create(model="paced", input=QUESTION, stream=True)
        assert last.type == "error"
        assert "the model broke" in last.message


async def test_a_chat_model_of_langchain_uses_it(server: Served) -> None:
    chat = ChatOpenAI(model="paced:sot", base_url=server.api, api_key="none", use_responses_api=True)  # type: ignore[arg-type]  # a text is taken
    assert chat.invoke(QUESTION).text == ANSWER
    assert "".join(str(chunk.text) for chunk in chat.stream(QUESTION)) == ANSWER
    assert (await chat.ainvoke(QUESTION)).usage_metadata
