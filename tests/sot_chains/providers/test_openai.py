"""``"openai:MODEL"``, against a server on loopback."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import openai
import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from sot_chains import ENGLISH, ModelProfile, Prompts, ProviderError, SkeletonOfThought
from sot_chains.calls.usage import NO_TOKENS
from sot_chains.providers import make_provider
from tests.sot_chains.fakes import ANSWER, QUESTION, nothing_runs, sot_of
from tests.sot_chains.server import MODEL, ChatServer, chat_server, unused_url

WITHOUT_EXAMPLES = ModelProfile(prompts=Prompts({"en": replace(ENGLISH, examples=())}))


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def sot_at(url: str, model: str = MODEL, **options: Any) -> SkeletonOfThought:
    return sot_of(f"openai:{model}", base_url=url, **{"profile": WITHOUT_EXAMPLES, **options})


async def test_an_answer_over_http(server: ChatServer) -> None:
    message = await sot_at(server.url).ainvoke([("system", "Be brief."), ("user", QUESTION)])
    assert message.content == ANSWER
    assert message.response_metadata["model_name"] == MODEL
    assert message.usage_metadata == {
        "input_tokens": 8,
        "output_tokens": 21,
        "total_tokens": 29,
        "input_token_details": {"cache_read": 4},
    }
    assert [p["finish_reason"] for p in message.response_metadata["sot"]["points"]] == ["stop"] * 3
    assert all(
        request["messages"][0] == {"role": "system", "content": "Be brief."} for request in server.requests
    )


async def test_parameters_are_fields_of_the_request(server: ChatServer) -> None:
    template = {"enable_thinking": False}
    await sot_at(server.url).ainvoke(
        QUESTION, stop=["END"], temperature=0.5, top_k=7, min_p=0.1, chat_template_kwargs=template
    )
    for request in server.requests:
        assert (request["stop"][0], request["temperature"]) == ("END", 0.5)
        # These are of other servers, and unknown to the SDK.
        assert (request["top_k"], request["min_p"], request["chat_template_kwargs"]) == (7, 0.1, template)
        assert len(request["stop"]) <= 4
        assert request["stream_options"] == {"include_usage": True}


async def test_a_server_that_does_not_count(server: ChatServer) -> None:
    message = await sot_at(server.url, stream_usage=False).ainvoke(QUESTION)
    assert message.content == ANSWER
    cost, usage = message.response_metadata["sot"]["cost"], message.usage_metadata
    assert cost["reported"] == NO_TOKENS
    assert usage is not None  # clients add up what they are told
    assert usage["output_tokens"] == cost["estimated"]["output_tokens"] > 0
    assert "stream_options" not in server.requests[0]


async def test_prefill_is_a_matter_of_the_server(server: ChatServer) -> None:
    assert not sot_at(server.url).provider.supports_prefill
    message = await sot_at(server.url, prefill=True).ainvoke(QUESTION)
    assert message.content != ""
    assert server.requests[0]["messages"][-1] == {"role": "assistant", "content": "1."}


def test_loops_come_and_go(server: ChatServer) -> None:
    sot = sot_at(server.url)
    assert sot.invoke(QUESTION).content == ANSWER
    for _ in range(2):
        assert asyncio.run(sot.ainvoke(QUESTION)).content == ANSWER
    assert sot.batch([QUESTION] * 2)[1].content == ANSWER
    assert "".join(chunk.text for chunk in sot.stream(QUESTION)) == ANSWER
    gc.collect()  # what is left open would warn now, and warnings are errors


async def test_connections_are_used_again(server: ChatServer) -> None:
    sot = sot_at(server.url)
    for _ in range(5):
        await sot.ainvoke(QUESTION)
    assert len(server.requests) == 20
    assert server.num_connections <= 4


def test_a_process_ends_quietly(server: ChatServer) -> None:
    code = (
        "import asyncio; from sot_chains import SkeletonOfThought;"
        f"sot = SkeletonOfThought('openai:{MODEL}', base_url='{server.url}');"
        "sot.invoke('Why?'); asyncio.run(sot.ainvoke('Why?')); asyncio.run(sot.ainvoke('Why?'));"
        "s = sot.stream('Why?'); next(s); print('done')"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")


async def test_leaving_early_closes_the_requests(server: ChatServer) -> None:
    server.pause_seconds = 0.02
    sot = sot_at(server.url)
    async with aclosing(sot.astream(QUESTION)) as chunks:
        async for chunk in chunks:
            if " to" in chunk.text:
                break
    assert await nothing_runs()
    assert server.all_closed()
    assert len(server.requests) == 4


async def test_cancelling_closes_the_requests(server: ChatServer) -> None:
    server.pause_seconds = 0.05
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sot_at(server.url).ainvoke(QUESTION), 0.2)
    assert await nothing_runs()
    assert server.all_closed()


async def test_a_server_that_is_down() -> None:
    url = unused_url()
    with pytest.raises(ProviderError, match=f"no connection to {url}.*server is running") as caught:
        await sot_at(url, max_retries=0).ainvoke(QUESTION)
    assert isinstance(caught.value.__cause__, openai.APIConnectionError)
    with pytest.raises(ProviderError, match="no connection"):
        sot_at(url, max_retries=0).invoke(QUESTION)
    assert await nothing_runs()


async def test_a_wrong_model(server: ChatServer) -> None:
    with pytest.raises(ProviderError, match=r"model 'large-9' \(404\): The model `large-9` does not exist"):
        await sot_at(server.url, "large-9").ainvoke(QUESTION)
    assert await nothing_runs()
    assert server.all_closed()


async def test_a_stream_that_breaks_off(server: ChatServer) -> None:
    server.break_off = True
    with pytest.raises(ProviderError, match=server.url):
        await sot_at(server.url, max_retries=0).ainvoke(QUESTION)
    assert await nothing_runs()


async def test_keys(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    await sot_at(server.url).ainvoke(QUESTION)
    assert set(server.keys) == {"not-needed"}
    server.key = "s3cret"
    with pytest.raises(ProviderError, match=r"refuses the API key \(401\): wrong key"):
        await sot_at(server.url).ainvoke(QUESTION)
    for key in ("s3cret", SecretStr("s3cret")):
        assert (await sot_at(server.url, api_key=key).ainvoke(QUESTION)).content == ANSWER
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    sot = sot_at(server.url)
    assert (await sot.ainvoke(QUESTION)).content == ANSWER
    assert "s3cret" not in repr(vars(sot.provider)) + repr(sot.provider)


async def test_without_a_key_openai_is_not_asked() -> None:
    with pytest.raises(ProviderError, match=r"no API key for https://api.openai.com/v1.*OPENAI_API_KEY"):
        await sot_of("openai:gpt-4.1").ainvoke(QUESTION)


@pytest.mark.parametrize("key", ["s3cret\n", " s3cret ", "s3cret\r\n"])
async def test_blanks_around_a_key_and_an_address_are_no_part_of_them(
    server: ChatServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "key", "s3cret")
    assert (await sot_at(server.url + "\n", api_key=key).ainvoke(QUESTION)).content == ANSWER
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert (await sot_at(server.url).ainvoke(QUESTION)).content == ANSWER


async def test_a_client_that_cannot_be_made_is_one_clear_error(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProviderError, match=r"the API key is no ASCII.*OPENAI_API_KEY"):
        await sot_at(server.url, api_key="s3cret\u200b").ainvoke(QUESTION)
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:1")
    with pytest.raises(ProviderError, match=r"no client for http.*socks://127.0.0.1:1"):
        await sot_at(server.url, api_key="other").ainvoke(QUESTION)


async def test_callbacks_see_chat_models(server: ChatServer) -> None:
    sot = sot_at(server.url, api_key="s3cret")
    usage = UsageMetadataCallbackHandler()
    await sot.ainvoke(QUESTION, {"callbacks": [usage]})
    assert usage.usage_metadata[MODEL]["total_tokens"] == 25
    events = [event async for event in sot.astream_events(QUESTION, version="v2")]
    ended = {e["name"]: e["data"]["output"] for e in events if e["event"] == "on_chat_model_end"}
    assert set(ended) == {"answer", "skeleton", "point_1", "point_2", "point_3"}
    assert ended["point_2"].content == "Close the curtains."
    assert ended["point_2"].usage_metadata["output_tokens"] == 3
    assert ended["answer"].content == ANSWER
    streamed = [
        e["data"]["chunk"].text
        for e in events
        if e["event"] == "on_chat_model_stream" and e["name"] == "point_2"
    ]
    assert streamed == ["Close ", "the ", "curtains."]
    assert "s3cret" not in str(events)


async def test_langchains_own_openai_model(server: ChatServer) -> None:
    model = ChatOpenAI(model=MODEL, base_url=server.url, api_key=SecretStr("any"), stream_usage=True)
    message = await sot_of(model).ainvoke(QUESTION)
    assert message.content == ANSWER
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == 21
    assert message.response_metadata["model_name"] == MODEL
    await model.root_async_client.close()


def test_base_url_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert repr(make_provider("openai:m")) == "OpenAIProvider('m', base_url='http://127.0.0.1:9/v1')"
