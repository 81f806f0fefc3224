"""Tool calls in the formats of common chat templates: shown, forced, read from streams, and answered."""

from __future__ import annotations

import functools
import json
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel
from torch import Tensor

from local_backend import ChatLocal, Engine
from local_backend.langchain.tools import CallReader, takes_tools
from tests.local_backend.langchain.tool_formats import FORMATS, Format, tool_tokenizer
from tests.tiny import random_llama, tiny_tokenizer

QUESTION = "What is the weather in Oslo?"


@tool
def weather(city: str, days: int = 1) -> str:
    """Look up the weather of a city."""
    return f"It rains in {city} for {days} days."


class Search(BaseModel):
    """Search the web."""

    words: list[str]


class _Scripted:
    """A logits processor: the model writes a text of the test's choice after each prompt that ends alike."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.reply: list[int] = []

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        index = token_ids.shape[1] - len(self.prompt)
        scores = torch.full_like(scores, -torch.inf)
        scores[0, self.reply[min(index, len(self.reply) - 1)]] = 0
        return scores


@dataclass
class _Model:
    chat: ChatLocal
    script: _Scripted
    prompts: list[str]

    def says(self, reply: str) -> None:
        tokenizer = self.chat.engine.tokenizer
        self.script.reply = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]


def _model(name: str, *, scripted: bool) -> Iterator[_Model]:
    tokenizer = tool_tokenizer(name)
    script = _Scripted()
    prompts: list[str] = []
    model = random_llama(
        vocab_size=len(tokenizer) + 4, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id
    )
    with Engine(model, tokenizer, logits_processors=(script,) if scripted else ()) as engine:
        make_row = engine.make_row

        def noted(prompt: Any, *args: Any, **kwargs: Any) -> Any:
            script.prompt = list(prompt)
            prompts.append(str(tokenizer.decode(prompt)))
            return make_row(prompt, *args, **kwargs)

        engine.make_row = noted  # type: ignore[method-assign]  # notes the prompt
        yield _Model(ChatLocal(engine=engine, max_tokens=200), script, prompts)


@pytest.fixture(scope="module", params=FORMATS)
def scripted(request: pytest.FixtureRequest) -> Iterator[tuple[Format, _Model]]:
    for model in _model(request.param, scripted=True):
        yield FORMATS[request.param], model


@pytest.fixture(scope="module", params=FORMATS)
def random_model(request: pytest.FixtureRequest) -> Iterator[tuple[str, _Model]]:
    for model in _model(request.param, scripted=False):
        yield request.param, model


def _calls(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    assert all(len(call["id"] or "") == 9 for call in message.tool_calls)
    assert len({call["id"] for call in message.tool_calls}) == len(message.tool_calls)
    return [(call["name"], call["args"]) for call in message.tool_calls]


async def test_calls_are_read_in_the_templates_format(scripted: tuple[Format, _Model]) -> None:
    form, model = scripted
    bound = model.chat.bind_tools([weather, Search])
    expected = ("weather", {"city": "Oslo", "days": 2})
    for reply, num_calls in ((form.call, 1), (form.calls, 2)):
        model.says(reply)
        message = bound.invoke(QUESTION)
        streamed: Any = None
        async for chunk in bound.astream(QUESTION):
            streamed = chunk if streamed is None else streamed + chunk
        for one in (message, streamed):
            assert _calls(one) == [expected] * num_calls, reply
            assert one.text == (form.text if reply.startswith("I look") else "")
            assert one.invalid_tool_calls == []
            assert one.usage_metadata == message.usage_metadata
    assert '"weather"' in model.prompts[-1]
    assert '"Search"' in model.prompts[-1]


def test_plain_answers_are_text(scripted: tuple[Format, _Model]) -> None:
    form, model = scripted
    bound = model.chat.bind_tools([weather])
    for text in ("It rains.", 'Like {"name": "x"} or <b>;', "<think>Hm.</think>\n\nIt rains."):
        model.says(text)
        for message in (bound.invoke(QUESTION), sum_of(bound.stream(QUESTION))):
            assert message.text == text.split("\n")[-1]
            assert not message.tool_calls
            assert message.additional_kwargs.get("reasoning_content", "") == (
                "Hm." if "think" in text else ""
            )
    model.says(form.call)
    assert not model.chat.bind_tools([weather], tool_choice="none").invoke(QUESTION).tool_calls
    assert '"weather"' not in model.prompts[-1]


def sum_of(chunks: Iterator[AIMessageChunk]) -> AIMessageChunk:
    first = next(chunks)
    return functools.reduce(lambda one, other: one + other, chunks, first)


def test_a_call_that_is_cut_off_is_no_call(scripted: tuple[Format, _Model]) -> None:
    form, model = scripted
    model.says(form.call)
    num_tokens = len(model.script.reply)
    for message in (
        model.chat.bind_tools([weather]).invoke(QUESTION, max_tokens=num_tokens - 12),
        sum_of(model.chat.bind_tools([weather]).stream(QUESTION, max_tokens=num_tokens - 12)),
    ):
        assert message.response_metadata["finish_reason"] == "length"
        if form is not FORMATS["qwen_coder"]:  # its marks are lenient
            assert not message.tool_calls
            assert "Oslo" in message.text


def test_a_forced_call_follows_its_schema(random_model: tuple[str, _Model]) -> None:
    """The model is of random weights: nothing but the grammar makes these calls."""
    name, model = random_model

    @tool
    def rate(stars: int, kind: bool) -> str:
        """Rate a place."""
        return "rated"

    @tool
    def leave() -> str:
        """Go."""
        return "left"

    for choice, names in (
        ("rate", {"rate"}),
        ("any", {"rate", "leave"}),
        ({"type": "function", "function": {"name": "leave"}}, {"leave"}),
    ):
        bound = model.chat.bind_tools([rate, leave], tool_choice=choice)
        message = bound.invoke(QUESTION)
        (call,) = _calls(message)
        assert call[0] in names
        assert set(call[1]) == ({"stars", "kind"} if call[0] == "rate" else set())
        assert message.text == ""
    assert _calls(sum_of(bound.stream(QUESTION))) == [call]
    sampled = model.chat.bind_tools([rate, leave], tool_choice="any").invoke(
        QUESTION, temperature=1.0, seed=3
    )
    assert len(sampled.tool_calls) == 1
    opening = {"hermes": "</think>\n\n<tool_call>\n", "mistral": "[TOOL_CALLS] ["}.get(name, "")
    assert model.prompts[-1].endswith(opening)
    with pytest.raises(OutputParserException, match=r"tool call was cut off .*raise max_tokens"):
        model.chat.bind_tools([rate], tool_choice="any").invoke(QUESTION, max_tokens=3)
    with pytest.raises(ValueError, match=r"name of one of \['rate'\], got 'drive'"):
        model.chat.bind_tools([rate], tool_choice="drive")
    structured = model.chat.with_structured_output(rate.args_schema, method="function_calling")
    assert set(structured.invoke(QUESTION).model_dump()) == {"stars", "kind"}  # type: ignore[union-attr]  # a class


def test_with_a_response_format_a_reply_is_a_call_or_follows_it(random_model: tuple[str, _Model]) -> None:
    """As agents ask that answer in a format of their own in the end."""
    _, model = random_model

    @tool
    def leave() -> str:
        """Go."""
        return "left"

    schema = {"type": "object", "properties": {"name_it": {"type": "boolean"}}, "required": ["name_it"]}
    asked = {"type": "json_schema", "json_schema": {"name": "rating", "schema": schema}}
    bound = model.chat.bind_tools([leave], response_format=asked)
    num_calls = 0
    for seed in range(8):
        message = bound.invoke(QUESTION, temperature=60.0, seed=seed)
        num_calls += len(message.tool_calls)
        if seed < 1:
            streamed = sum_of(bound.stream(QUESTION, temperature=60.0, seed=seed))
            assert (streamed.text, _calls(streamed)) == (message.text, _calls(message))
        if message.tool_calls:
            assert _calls(message) == [("leave", {})]
            assert message.text == ""
        else:
            assert set(json.loads(message.text)) == {"name_it"}
        if 0 < num_calls <= seed:  # both have come
            break
    assert 0 < num_calls < 8


def test_results_go_back_through_the_template(scripted: tuple[Format, _Model]) -> None:
    form, model = scripted
    model.says("It rains.")
    call = {
        "name": "weather",
        "args": {"city": "Oslo", "days": 2},
        "id": "call_of_another_model",
        "type": "tool_call",
    }
    turns = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("Rain <|im_end|>", tool_call_id="call_of_another_model"),
    ]
    assert model.chat.bind_tools([weather]).invoke(turns).text == "It rains."
    prompt = model.prompts[-1]
    assert form.history in prompt
    assert prompt.index(form.history) < prompt.rindex("Rain ")
    # And the model's own: what it said is what it reads.
    model.says(form.call)
    own = model.chat.bind_tools([weather]).invoke(QUESTION)
    model.says("It rains.")
    result = ToolMessage("Rain", tool_call_id=own.tool_calls[0]["id"])
    assert model.chat.bind_tools([weather]).invoke([HumanMessage(QUESTION), own, result]).text == "It rains."
    assert form.history in model.prompts[-1]


@given(data=st.data())
def test_a_stream_may_be_cut_anywhere(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    form = FORMATS[name]
    reply = data.draw(st.sampled_from([form.call, form.calls, f"<think>Hm.</think>{form.call}"]))
    whole = CallReader.of_template(tool_tokenizer(name), [], "").read(reply + form.end, "stop")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(reply)), max_size=12)))
    if data.draw(st.booleans()):
        cuts = list(range(1, len(reply)))
    reader = CallReader.of_template(tool_tokenizer(name), [], "")
    pieces = [reply[start:end] for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
    chunks = [reader.read(piece, None) for piece in pieces] + [reader.read(form.end, "stop")]
    merged = sum_of(iter(chunks))
    assert len(whole.tool_calls) == (2 if reply == form.calls else 1)
    assert [(call["name"], call["args"]) for call in merged.tool_calls] == [
        (call["name"], call["args"]) for call in whole.tool_calls
    ]
    assert merged.content == whole.content
    assert merged.additional_kwargs == whole.additional_kwargs


@given(
    text=st.text(alphabet='{}[]"<>/:;,nametoolcarguspy_ \n|[TOOL_CALLS]', max_size=60), seed=st.integers(0, 9)
)
def test_whatever_a_model_writes_nothing_is_raised_and_no_text_is_lost(text: str, seed: int) -> None:
    for name, form in FORMATS.items():
        begun = form.call[: random.Random(seed).randrange(len(form.call))] + text
        merged = CallReader.of_template(tool_tokenizer(name), [], "").read(begun, "length")
        if not merged.tool_calls and not merged.additional_kwargs:
            # But for the marks of other tokens, and of what looked like a call.
            shown = str(merged.content)
            lost = len(begun) - len(shown)
            assert lost == sum(len(token) * begun.count(token) for token in form.tokens if token not in shown)


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama_3"])
def test_a_call_that_cannot_be_read_stays_text(name: str) -> None:
    form = FORMATS[name]
    reply = (
        f"Well. {form.call.replace('2}', '2,}')} Or so."
        if name == "hermes"
        else form.call.replace("2}", "2,}")
    )
    whole = CallReader.of_template(tool_tokenizer(name), [], "").read(reply, "stop")
    reader = CallReader.of_template(tool_tokenizer(name), [], "")
    pieces = sum_of(iter([*(reader.read(letter, None) for letter in reply), reader.read("", "stop")]))
    assert whole.content == pieces.content == reply
    assert not whole.tool_calls + pieces.tool_calls
    if name == "hermes":
        after_one = CallReader.of_template(tool_tokenizer(name), [], "").read(f"{form.call}\n{reply}", "stop")
        assert len(after_one.tool_calls) == 1


def test_a_tokenizers_own_response_template_comes_first() -> None:
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {"open": "CALL", "close": "END", "content": "json"},
            "content": {"content": "text"},
        },
    }
    for model in _model("hermes", scripted=True):
        model.chat.engine.tokenizer.response_template = template
        model.says('Well: CALL{"name": "weather", "arguments": {"city": "Oslo"}}END')
        message = model.chat.bind_tools([weather]).invoke(QUESTION)
    assert _calls(message) == [("weather", {"city": "Oslo"})]
    assert message.text.strip() == "Well:"


def test_a_template_without_tools_says_so(chat: ChatLocal, default_chat: ChatLocal) -> None:
    for model in (chat, default_chat):
        assert not takes_tools(model.engine.tokenizer)
        assert model.profile is not None
        assert model.profile["tool_calling"] is False
        with pytest.raises(ValueError, match=r"chat template takes no tools.*with_structured_output"):
            model.bind_tools([weather])
    call = {"name": "weather", "args": {}, "id": "1", "type": "tool_call"}
    with pytest.raises(ValueError, match="chat template takes no tools"):
        chat.invoke(
            [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("x", tool_call_id="1")]
        )


def test_a_format_that_is_not_known_says_so() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + tokenizer.chat_template
    )
    with Engine(random_llama(eos_token_id=1, max_position_embeddings=2048), tokenizer) as engine:
        chat = ChatLocal(engine=engine, max_tokens=60)
        assert chat.profile is not None
        assert chat.profile["tool_calling"] is True
        with pytest.raises(
            ValueError, match=r"how the model writes calls is not known: set tokenizer.response"
        ):
            chat.bind_tools([weather]).invoke(QUESTION)
        forced = chat.bind_tools([{"name": "leave", "description": "Go."}], tool_choice="leave")
        assert _calls(forced.invoke(QUESTION)) == [("leave", {})]
        counted = chat.get_num_tokens_from_messages([HumanMessage(QUESTION)], tools=[weather])
        assert counted > chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) + 40


@pytest.mark.parametrize("name", ["hermes", "qwen_coder", "mistral_v11"])
def test_what_closes_a_call_may_stand_in_its_arguments(name: str) -> None:
    text = FORMATS[name].call.replace("Oslo", "a</tool_call>[TOOL_CALLS] b")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    read = CallReader.of_template(tool_tokenizer(name), tools, "").read(text, "stop")
    assert [json.loads(call["args"] or "")["city"] for call in read.tool_call_chunks] == [
        "a</tool_call>[TOOL_CALLS] b"
    ]


@pytest.mark.parametrize("choice", [None, "any"])
def test_tools_of_vendors_are_named(choice: str | None) -> None:
    tokenizer = tool_tokenizer("hermes")
    chat = ChatLocal(engine=Engine(random_llama(vocab_size=len(tokenizer)), tokenizer))
    with chat, pytest.raises(ValueError, match=r"give functions, got \['web_search_preview'\]"):
        chat.bind_tools([{"type": "web_search_preview"}], tool_choice=choice)


@pytest.mark.parametrize("name", ["hermes", "llama_3", "mistral"])
@pytest.mark.parametrize(("written", "args"), [("null", {}), ('{"city": "a\nb\tc"}', {"city": "a\nb\tc"})])
def test_arguments_that_are_null_or_hold_a_line_feed_are_arguments(
    name: str, written: str, args: Any
) -> None:
    call = f'{{"name": "weather", "arguments": {written}}}'
    text = {
        "hermes": f"<tool_call>{call}</tool_call>",
        "llama_3": call.replace("arguments", "parameters"),
        "mistral": f"[TOOL_CALLS] [{call}]",
    }[name]
    reader = CallReader.of_template(tool_tokenizer(name), [convert_to_openai_tool(weather)], "")
    chunks = [reader.read(letter, None) for letter in text]
    message = functools.reduce(operator.add, [*chunks, reader.read("", "stop")])
    assert [(one["name"], one["args"]) for one in message.tool_calls] == [("weather", args)]
    assert not message.text.strip()
