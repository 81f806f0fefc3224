"""Messages of all kinds and orders reach the model: no text is lost silently, no template's error raised."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from transformers import PreTrainedTokenizerBase

from local_backend import ChatLocal, Engine, References
from local_backend.langchain.chat_format import copied_texts, turn_ends
from local_backend.langchain.reply import Reply, ReplyFormat, reply_prompt
from local_backend.langchain.turns import make_turns
from tests.families import FAMILIES, tokenizer_of
from tests.local_backend.langchain.strict_templates import TEMPLATES, strict_tokenizer
from tests.local_backend.langchain.tool_formats import FORMATS, tool_tokenizer
from tests.tiny import random_llama, tiny_chat

SYSTEM, ASK, REPLY = SystemMessage("Be-kind."), HumanMessage("Ask-one?"), AIMessage("Reply-one.")
LATER, NEXT, BEGUN = SystemMessage("Be-brief."), HumanMessage("Ask-two?"), AIMessage("Sure, one")
CHATS: dict[str, list[BaseMessage]] = {
    "a system": [SYSTEM, ASK],
    "a system alone": [SYSTEM],
    "two questions": [ASK, NEXT],
    "two systems": [SYSTEM, LATER, ASK],
    "a system in the middle": [ASK, REPLY, LATER, NEXT],
    "a system at the end": [ASK, LATER],
    "a reply first": [REPLY, ASK],
    "a system and a reply first": [SYSTEM, REPLY, ASK],
    "two replies": [ASK, REPLY, AIMessage("Reply-two."), NEXT],
    "a begun reply": [SYSTEM, ASK, BEGUN],
    "a begun reply after another": [ASK, REPLY, BEGUN],
    "a reply alone": [REPLY],
    "no text": [HumanMessage("")],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"name": "weather", "args": {"city": "Oslo"}, "id": "toolu_1", "type": "tool_call"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[BaseMessage], tools: list[Any] | None = None
) -> tuple[str, str]:
    """The prompt, and the part of it that is a reply already begun."""
    token_ids, num_begun = reply_prompt(tokenizer, messages, ReplyFormat(tokenizer, {"tools": tools}))
    return str(tokenizer.decode(token_ids)), str(tokenizer.decode(token_ids[len(token_ids) - num_begun :]))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", [*TEMPLATES, *FAMILIES])
def test_every_text_of_a_chat_reaches_every_family(family: str, chat: str) -> None:
    tokenizer = strict_tokenizer(family) if family in TEMPLATES else tokenizer_of(family)
    prompt, begun = rendered(tokenizer, CHATS[chat])
    for message in CHATS[chat]:
        assert message.text in prompt
    last = CHATS[chat][-1]
    assert begun.strip() == (last.text if isinstance(last, AIMessage) else "")


def test_a_strict_template_gets_turns_that_alternate() -> None:
    prompt, _ = rendered(strict_tokenizer("gemma"), [SYSTEM, ASK, NEXT, REPLY, LATER, NEXT])
    assert prompt == (
        "<start_of_turn>user\nBe-kind.\n\nBe-brief.\n\nAsk-one?\n\nAsk-two?<end_of_turn>\n"
        "<start_of_turn>model\nReply-one.<end_of_turn>\n<start_of_turn>user\nAsk-two?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    # A template that takes its own system keeps it, and one that takes all turns gets them as they are.
    assert rendered(strict_tokenizer("mistral_3"), [SYSTEM, ASK, REPLY, NEXT])[0].endswith(
        "[INST] Be-kind.\n\nAsk-two?[/INST]"
    )
    assert rendered(tokenizer_of("qwen"), [ASK, NEXT])[0].count("<|im_start|>user") == 2


def test_what_no_order_makes_acceptable_is_named() -> None:
    tokenizer = strict_tokenizer("gemma")
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ValueError, match=r"the chat template refuses these messages \(never\)"):
        rendered(tokenizer, [ASK])
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.warns(UserWarning, match="leaves out part of the messages"):
        rendered(tokenizer, [ASK])


# Histories of other models -------------------------------------------------------------------------

HISTORIES: dict[str, list[Any]] = {
    "Anthropic's thinking": [
        {"type": "thinking", "thinking": "Thought-one.", "signature": "x"},
        {"type": "text", "text": "Reply-one."},
    ],
    "standard reasoning": [
        {"type": "reasoning", "reasoning": "Thought-one."},
        {"type": "text", "text": "Reply-one."},
    ],
    "OpenAI's reasoning": [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Thought-one."}]},
        {"type": "text", "text": "Reply-one.", "annotations": []},
    ],
    "output_text": [{"type": "output_text", "text": "Reply-one."}],
    "a citation between": [
        {"type": "text", "text": "Reply-"},
        {"type": "text", "text": "one.", "citations": []},
    ],
    "Bedrock's": [{"text": "Reply-one."}],
    "blank texts": [{"type": "text", "text": ""}, {"type": "text", "text": "Reply-one."}],
    "strings": ["Reply-", "one."],
    "a refusal": [{"type": "refusal", "refusal": "Reply-one."}],
}
LEFT_OUT: dict[str, list[Any]] = {
    "server_tool_use": [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "text", "text": "Reply-one."},
    ],
    "web_search_tool_result": [
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "url": "u"}],
        },
        {"type": "text", "text": "Reply-one."},
    ],
    "code_execution_tool_result": [
        {
            "type": "code_execution_tool_result",
            "content": {"type": "code_execution_result", "stdout": "1", "content": []},
        },
        {"type": "text", "text": "Reply-one."},
    ],
    "redacted_thinking": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Reply-one."}],
    "image_generation_call": [{"type": "image_generation_call", "result": "AA"}, "Reply-one."],
}


@pytest.mark.parametrize("history", HISTORIES)
def test_replies_of_other_models_are_read(history: str) -> None:
    _, turn, _ = make_turns([ASK, AIMessage(HISTORIES[history]), NEXT])
    assert turn["content"] == "Reply-one."
    assert turn.get("reasoning_content", "") == (
        "Thought-one." if "Thought" in str(HISTORIES[history]) else ""
    )


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_is_no_text_is_left_out_of_replies_with_a_warning(kind: str) -> None:
    with pytest.warns(UserWarning, match=f"'{kind}', which is left out"):
        _, turn, _ = make_turns([ASK, AIMessage(LEFT_OUT[kind]), NEXT])
    assert turn["content"] == "Reply-one."


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_beside_the_text_goes_on_to_the_template(key: str) -> None:
    tokenizer = tokenizer_of("qwen")
    given = AIMessage("Reply-one.", additional_kwargs={key: "Thought-one."})
    assert make_turns([ASK, given])[1]["reasoning_content"] == "Thought-one."
    assert "Thought-one." not in rendered(tokenizer, [ASK, given, NEXT])[0]  # this one does not show it


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ([IMAGE], "image"),
        ([{"type": "text", "text": "See?"}, IMAGE], "image"),
        ([{"cachePoint": {}}], "cachePoint"),
    ],
)
def test_a_question_that_is_no_text_is_an_error(content: list[Any], kind: str) -> None:
    with pytest.raises(ValueError, match=f"reads text only, but the user message holds '{kind}'"):
        make_turns([HumanMessage(content)])


def test_a_document_in_a_question_is_its_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Doc-text"}
    blocks: list[Any] = [{"type": "document", "source": source}, {"type": "text", "text": "Ask-one?"}]
    assert make_turns([HumanMessage(blocks)])[0]["content"] == "Doc-text\nAsk-one?"


@pytest.mark.parametrize("name", FORMATS)
def test_results_of_all_kinds_go_back_through_the_template(name: str) -> None:
    tokenizer = tool_tokenizer(name)
    search = {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "Sunny."}]}
    results: list[Any] = [
        "Sunny.",
        ["Sunny."],
        [search],
        [{"type": "text", "text": "Sunny."}, IMAGE],
        [IMAGE],
    ]
    for result in results:
        chat = [ASK, AIMessage("", tool_calls=[CALL]), ToolMessage(result, tool_call_id="toolu_1"), NEXT]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tool message holds 'image', which is left out")
            prompt, _ = rendered(tokenizer, chat, [TOOL])
        assert ("Sunny." in prompt) == ("Sunny." in str(result))
        assert "Oslo" in prompt
        assert "Ask-two?" in prompt


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arguments", ["", '{"city": "Os', "[]", "null"])
def test_broken_arguments_are_left_out_with_a_warning(name: str, arguments: str) -> None:
    broken = {"name": "weather", "args": arguments, "id": "c", "error": "bad", "type": "invalid_tool_call"}
    function = {"name": "weather", "arguments": arguments}
    block = {"type": "function_call", "call_id": "c", **function}
    openai = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    for reply in (AIMessage("", invalid_tool_calls=[broken]), AIMessage([block]), openai):
        if reply is openai and arguments in ("[]", "null"):
            continue  # LangChain takes them for none
        chat: list[Any] = [ASK, reply, ToolMessage("No-JSON.", tool_call_id="c", status="error")]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            prompt, _ = rendered(tool_tokenizer(name), chat, [TOOL])
        assert "No-JSON." in prompt
        assert prompt.count("weather") == 2  # as a tool, and as the call
        assert [repr(arguments) in str(one.message) for one in told] == ([True] if arguments else [])


def test_a_template_that_joins_arguments_to_text_gets_text() -> None:
    tokenizer = tool_tokenizer("qwen_coder")  # DeepSeek's templates do so
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ '```json ' + c['function']['arguments'] + '```' }}{% endfor %}{% endfor %}"
    )
    chat = [ASK, AIMessage("", tool_calls=[CALL]), ToolMessage("Sunny.", tool_call_id="toolu_1")]
    assert '```json {"city": "Oslo"}```' in rendered(tokenizer, chat, [TOOL])[0]


def test_a_question_after_a_result_and_a_call_without_one() -> None:
    tokenizer = strict_tokenizer("mistral_3")
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{% if loop.index0 and m.role == 'user' and "
        "messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('no user after tool') }}{% endif %}"
        "{{ m.role + ':' + m.content + (m.tool_calls or []) | tojson + ';' }}{% endfor %}"
    )
    call = AIMessage("", tool_calls=[CALL])
    prompt, _ = rendered(tokenizer, [ASK, call, ToolMessage("Sunny.", tool_call_id="toolu_1"), NEXT], [TOOL])
    assert "tool:Sunny.[];assistant:[];user:Ask-two?[];" in prompt
    assert "Oslo" in rendered(tokenizer, [ASK, call], [TOOL])[0]


def test_a_template_that_takes_one_call_at_once_gets_each_with_its_result() -> None:
    tokenizer = tool_tokenizer("llama_3")
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{% if m.tool_calls is defined %}{% if m.tool_calls|length != 1 %}"
        "{{ raise_exception('one tool call at once') }}{% endif %}"
        "[{{ m.tool_calls[0].function.arguments.city }}]{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    calls = AIMessage("", tool_calls=[CALL, {**CALL, "id": "2", "args": {"city": "Bonn"}}])  # type: ignore[typeddict-item]  # a call
    results = [ToolMessage("Rain.", tool_call_id="2"), ToolMessage("Sunny.", tool_call_id="toolu_1")]
    prompt, _ = rendered(tokenizer, [ASK, calls, *results, NEXT], [TOOL])
    assert prompt.endswith("[Ask-one?][Oslo][Sunny.][Bonn][Rain.][Ask-two?]")


# Too long, and cut short ---------------------------------------------------------------------------


async def test_a_prompt_longer_than_the_positions_is_langchains_error() -> None:
    tokenizer = tokenizer_of("llama_3")
    model = random_llama(vocab_size=len(tokenizer), max_position_embeddings=64)
    long = "word " * 80
    with Engine(model, tokenizer) as engine:
        chat = ChatLocal(engine=engine, max_tokens=4)
        with pytest.raises(
            ValueError, match=r"prompt has \d+ tokens, but the model has positions for 64 .*shorten it"
        ):
            engine.generate([[1] * 64])
        for call in (
            lambda: chat.invoke(long),
            lambda: list(chat.stream(long)),
            lambda: chat.batch(["a", long]),
        ):
            with pytest.raises(ContextOverflowError, match="positions for 64") as raised:
                call()
            assert isinstance(raised.value, ValueError)
        with pytest.raises(ContextOverflowError):
            await chat.ainvoke(long)
        with pytest.raises(ContextOverflowError):
            [chunk async for chunk in chat.astream(long)]
        answer, error = chat.batch(["a", long], return_exceptions=True)
        assert isinstance(answer, AIMessage)
        assert isinstance(error, ContextOverflowError)


def test_a_reply_ends_where_the_tokenizer_or_the_template_ends_a_turn() -> None:
    for family, kind in FAMILIES.items():
        tokenizer = tokenizer_of(family)
        (end,) = turn_ends(tokenizer)
        assert tokenizer.convert_ids_to_tokens(end) == kind.end
        # Where the tokenizer's end token is another, as a base model's, the template tells.
        tokenizer.add_special_tokens({"eos_token": "<|other|>"})
        assert {end, tokenizer.eos_token_id} == {*turn_ends(tokenizer)}
        model = random_llama(vocab_size=len(tokenizer), eos_token_id=7)
        with Engine(model, tokenizer) as engine:
            reply = Reply(ChatLocal(engine=engine), [ASK], None, {})
            assert {7, end, tokenizer.eos_token_id} <= reply.row(lambda _: None).end_token_ids
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert turn_ends(tokenizer) == (tokenizer.eos_token_id,)
    tokenizer.chat_template = "<|other|>{{ messages[0].content }}"
    assert turn_ends(tokenizer) == (tokenizer.eos_token_id,)


async def test_a_stream_that_is_left_was_counted() -> None:
    with tiny_chat(max_tokens=40) as chat:
        whole = chat.invoke("Hi")
        assert whole.usage_metadata is not None
        chunks = []
        stream = chat.astream("Hi")
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 1:
                break
        assert chunks[0].usage_metadata is not None
        assert chunks[0].usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
        assert 1 <= chunks[0].usage_metadata["output_tokens"] <= 40
        merged = None
        for chunk in chat.stream("Hi", stop=[whole.text[20:22]]):
            merged = chunk if merged is None else merged + chunk
        stopped = chat.invoke("Hi", stop=[whole.text[20:22]])
        assert merged is not None
        assert merged.usage_metadata == stopped.usage_metadata
        assert merged.text == stopped.text


def test_documents_are_shown_by_a_template_that_was_made_for_them() -> None:
    documents = [{"title": "Flour", "text": "Wheat-and-rye."}, {"text": "Salt <|im_end|>"}]
    with tiny_chat() as chat:
        tokenizer = copy.deepcopy(chat.engine.tokenizer)
    plain, _ = reply_prompt(tokenizer, [ASK], ReplyFormat(tokenizer, {"documents": documents}))
    assert plain == reply_prompt(tokenizer, [ASK], ReplyFormat(tokenizer, {}))[0]
    tokenizer.chat_template = (
        "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}" + tokenizer.chat_template
    )
    form = ReplyFormat(tokenizer, {"documents": documents})
    shown = tokenizer.decode(reply_prompt(tokenizer, [ASK], form)[0])
    assert shown.startswith("[Flour: Wheat-and-rye.][: Salt <|im_end|>]")


def test_an_answer_may_copy_from_documents() -> None:
    assert copied_texts({"documents": [{"text": "One."}], "references": ["Two."]}) == References(
        ["Two.", "One."]
    )
    assert copied_texts({"documents": []}) is None
    with pytest.raises(ValueError, match='documents are objects with a "text"'):
        copied_texts({"documents": ["One."]})
    with tiny_chat("reference_copy") as chat:
        text = chat.invoke("Hello", max_tokens=12).text
        reply = chat.invoke("Hello", max_tokens=12, documents=[{"title": "T", "text": text}])
    assert reply.text == text
    assert reply.response_metadata["decoding"]["num_accepted"] > 0
