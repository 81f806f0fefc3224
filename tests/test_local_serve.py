"""A client's mistakes against a local model behind ``sot serve``: a status of 4xx that names the problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from local_backend import ChatLocal, Engine
from tests.local_backend.langchain.strict_templates import strict_tokenizer
from tests.local_backend.langchain.tool_formats import tool_tokenizer
from tests.sot_chains.serving.running import served
from tests.tiny import random_llama


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    tokenizer = strict_tokenizer("gemma")  # refuses a system, and turns that do not alternate
    model = random_llama(vocab_size=len(tokenizer), max_position_embeddings=512)
    chat = ChatLocal(engine=Engine(model, tokenizer), max_tokens=4, model_name="local")
    with chat, served(chat) as running, openai.OpenAI(base_url=running.api, api_key="none") as client:
        yield client


def refusal(client: openai.OpenAI, content: Any, *, model: str, stream: bool) -> openai.APIStatusError:
    messages: Any = [{"role": "user", "content": content}]
    with pytest.raises(openai.APIStatusError) as raised:
        list(client.chat.completions.create(model=model, messages=messages, stream=stream))
    return raised.value


@pytest.mark.parametrize("model", ["local", "local:sot"])
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_the_clients(client: openai.OpenAI, model: str, stream: bool) -> None:
    too_long = refusal(client, "bread " * 600, model=model, stream=stream)
    assert (too_long.status_code, too_long.code) == (400, "context_length_exceeded")
    assert "positions for 512" in too_long.message
    image = refusal(
        client,
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        model=model,
        stream=stream,
    )
    assert image.status_code == 400
    assert "image_url" in image.message


def test_roles_that_the_template_refuses_are_answered(client: openai.OpenAI) -> None:
    text = {role: {"role": role, "content": "How to bake bread?"} for role in ("system", "user", "assistant")}
    for roles in (["system"], ["system", "user"], ["user", "user"], ["assistant", "system", "user"]):
        messages: Any = [text[role] for role in roles]
        assert client.chat.completions.create(model="local", messages=messages).choices


@pytest.mark.parametrize("arguments", ["", "null", "[]", '{"city": "Os', '{"city": "Oslo"}'])
@pytest.mark.filterwarnings("ignore:arguments of a call")
def test_calls_with_broken_arguments_are_answered(arguments: str) -> None:
    tokenizer = tool_tokenizer("hermes")
    model = random_llama(vocab_size=len(tokenizer), max_position_embeddings=512)
    chat = ChatLocal(engine=Engine(model, tokenizer), max_tokens=4, model_name="local")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages: Any = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
    ]
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    with chat, served(chat) as running, openai.OpenAI(base_url=running.api, api_key="none") as client:
        assert client.chat.completions.create(model="local", messages=messages, tools=tools).choices
