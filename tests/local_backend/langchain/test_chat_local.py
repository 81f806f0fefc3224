"""``ChatLocal``: one engine under all ways of calling."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from local_backend import ChatLocal, Engine
from tests.tiny import random_llama, tiny_chat

QUESTION = "How can I bake bread at home?"


def _is_idle(chat: ChatLocal) -> bool:
    return chat.engine.num_rows == 0


async def test_the_six_ways_say_the_same(chat: ChatLocal) -> None:
    text = chat.invoke(QUESTION).text
    assert text
    assert (await chat.ainvoke(QUESTION)).text == text
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == text
    assert "".join([chunk.text async for chunk in chat.astream(QUESTION)]) == text
    assert [message.text for message in chat.batch([QUESTION, QUESTION])] == [text, text]
    assert [message.text for message in await chat.abatch([QUESTION, QUESTION])] == [text, text]


def test_it_composes(chat: ChatLocal) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | chat | StrOutputParser()
    assert chain.invoke({"question": QUESTION}) == chat.invoke(QUESTION).text


def test_usage_and_decoding_are_reported_once_in_a_stream(chat: ChatLocal) -> None:
    message = chat.invoke(QUESTION)
    merged = None
    for chunk in chat.stream(QUESTION):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    assert message.usage_metadata is not None
    assert merged.usage_metadata == message.usage_metadata
    assert message.usage_metadata["output_tokens"] == 40
    assert message.response_metadata["finish_reason"] == "length"
    assert message.response_metadata["decoding"]["num_forwards"] == 40
    assert merged.response_metadata["decoding"]["drafter"] == "autoregressive"


def test_a_final_assistant_message_is_continued(default_chat: ChatLocal) -> None:
    whole = default_chat.invoke(QUESTION, max_tokens=10).text
    begun = " ".join(whole.split(" ")[:6])
    rest = default_chat.invoke([HumanMessage(QUESTION), AIMessage(begun)], max_tokens=8).text
    assert (begun + rest).startswith(whole)


def test_system_message_and_earlier_turns_are_read(chat: ChatLocal) -> None:
    alone = chat.invoke(QUESTION)
    told = chat.invoke([SystemMessage("Be concise, correct and polite."), HumanMessage(QUESTION)])
    assert alone.usage_metadata is not None
    assert told.usage_metadata is not None
    assert told.usage_metadata["input_tokens"] > alone.usage_metadata["input_tokens"]


def test_parameters_per_call(chat: ChatLocal) -> None:
    assert len(chat.invoke(QUESTION, max_tokens=5).text) < len(chat.invoke(QUESTION).text)
    sampled = [chat.invoke(QUESTION, temperature=2.0, seed=seed).text for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    whole = chat.invoke(QUESTION).text
    part = whole[12:15]
    assert chat.bind(stop=[part]).invoke(QUESTION).text == whole[: whole.index(part)]
    assert chat.get_num_tokens("bread at home") == len(chat.get_token_ids("bread at home")) > 0


async def test_64_concurrent_calls_share_forwards(chat: ChatLocal) -> None:
    before = chat.engine.stats.num_forwards
    questions = [f"{QUESTION} {number}" for number in range(64)]
    messages = await asyncio.gather(*(chat.ainvoke(question) for question in questions))
    # 64 calls of 40 tokens: rows of one batch, however late some of them arrive on a busy machine.
    assert chat.engine.stats.num_forwards - before < 64 * 40 / 4
    assert messages[17].text == chat.invoke(questions[17]).text
    assert _is_idle(chat)


async def test_threads_tasks_and_cancellation_together(chat: ChatLocal) -> None:
    questions = [f"{QUESTION} {number}" for number in range(12)]
    alone = [chat.invoke(question).text for question in questions]
    in_threads: dict[int, str] = {}

    def call(number: int) -> None:
        in_threads[number] = chat.invoke(questions[number]).text

    threads = [threading.Thread(target=call, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    tasks = [asyncio.create_task(chat.ainvoke(question)) for question in questions]
    await asyncio.sleep(0.02)
    cancelled = random.Random(0).sample(range(12), 4)
    for number in cancelled:
        tasks[number].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for thread in threads:
        await asyncio.to_thread(thread.join)
    for number, result in enumerate(results):
        if isinstance(result, AIMessage):
            assert result.text == alone[number]
        else:
            assert number in cancelled
    assert [in_threads[number] for number in range(12)] == alone
    for _ in range(200):
        if _is_idle(chat):
            break
        await asyncio.sleep(0.01)
    assert _is_idle(chat)


def test_what_it_cannot_read_is_named(chat: ChatLocal) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(ValueError, match="reads text only, but the user message holds 'image_url'"):
        chat.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, image])])
    with pytest.raises(ValueError, match="at least one"):
        chat.invoke([])
    with pytest.raises(ValueError, match="positions for 2048"):
        chat.invoke("bread " * 3000)
    with pytest.raises(ValueError, match="temperature must be 0"):
        chat.invoke(QUESTION, temperature=-1)
    assert _is_idle(chat)


def test_a_missing_model_and_a_missing_template_are_named(
    tmp_path: object, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(OSError, match="no-such-model"):
        ChatLocal.from_pretrained(f"{tmp_path}/no-such-model")
    folder = f"{tmp_path}/without-template"
    model.save_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="no chat template"):
        ChatLocal.from_pretrained(folder)


def test_a_template_that_opens_a_block_of_reasoning_is_noticed() -> None:
    with tiny_chat() as chat:
        tokenizer = chat.engine.tokenizer
        assert not chat.opens_reasoning
        tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
        assert chat.opens_reasoning


def test_an_answer_is_bounded_unless_told_otherwise(chat: ChatLocal) -> None:
    """A small model that repeats itself never ends by itself."""
    unset = ChatLocal(engine=chat.engine)
    assert unset.max_tokens == 1024
    message = unset.invoke(QUESTION, drafter="reference_copy")  # which is quick with what repeats itself
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == 1024
    assert message.response_metadata["finish_reason"] == "length"
    short = random_llama(max_position_embeddings=128, eos_token_id=None)
    with Engine(short, chat.engine.tokenizer, use_generation_config=False) as engine:
        unbounded = ChatLocal(engine=engine, max_tokens=None).invoke(QUESTION)
    assert unbounded.usage_metadata is not None
    assert unbounded.usage_metadata["total_tokens"] == 128


def test_max_new_tokens_is_another_name(chat: ChatLocal) -> None:
    named = ChatLocal(engine=chat.engine, max_new_tokens=7)  # type: ignore[call-arg]  # pydantic's other name
    assert named.max_tokens == 7
    for message in (named.invoke(QUESTION), chat.invoke(QUESTION, max_new_tokens=7)):
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] == 7
    with pytest.raises(ValueError, match="set the same limit"):
        chat.invoke(QUESTION, max_tokens=6, max_new_tokens=7)


def test_closing_is_final() -> None:
    chat = tiny_chat()
    chat.close()
    with pytest.raises(RuntimeError, match="closed"):
        chat.invoke(QUESTION)


def test_what_was_copied_is_told_by_token(default_chat: ChatLocal) -> None:
    chat = default_chat.model_copy(update={"max_tokens": 12})
    text = chat.invoke(QUESTION).text
    message = chat.invoke(QUESTION, references=["Something else.", text])
    assert message.text == text
    (span,) = message.response_metadata["decoding"]["copied_spans"]
    assert (span["start"], span["reference"], span["reference_start"]) == (0, 1, 0)
    assert span["num_tokens"] >= 11
    assert "copied_spans" not in chat.invoke(QUESTION).response_metadata["decoding"]
