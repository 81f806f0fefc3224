"""``ChatLocal`` as LangChain's users call it: references, caches, traces, configuration, many at once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import resource
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run

from local_backend import ChatLocal, Engine, References, SamplingParams
from local_backend.langchain.chat_format import chat_prompt
from tests.tiny import tiny_chat

QUESTION = "How can I bake bread at home?"
SECRET = "Let the sealed document say marmalade."


@pytest.fixture(scope="module")
def copying() -> Iterator[ChatLocal]:
    with tiny_chat("reference_copy", max_tokens=60) as chat:
        yield chat


@pytest.fixture(scope="module")
def plain(default_chat: ChatLocal) -> AIMessage:
    """What the default model answers by itself."""
    return default_chat.invoke(QUESTION, max_tokens=24)


def _wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    while engine.num_rows and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.num_rows == 0


# References ----------------------------------------------------------------------------------------


def test_references_are_a_short_handle() -> None:
    one, same, other = References([SECRET, "b"]), References([SECRET, "b"]), References([SECRET + "b"])
    assert one == same != other
    assert hash(one) == hash(same) != hash(other)
    assert repr(one) == f"References(2 texts, {one.digest[:16]})"
    assert len(one) == 2
    assert one.texts == (SECRET, "b")
    assert References.of(one) is one
    with pytest.raises(TypeError, match="give a list of str"):
        References(SECRET)
    with pytest.raises(TypeError, match="give a list of str"):
        References([3])  # type: ignore[list-item]  # the mistake under test


def test_references_are_copied_and_change_no_answer(default_copying: ChatLocal, plain: AIMessage) -> None:
    document = f"To begin with. {plain.text} And so on."
    for references in ([document], References([document])):
        copied = default_copying.bind(references=references, max_tokens=24).invoke(QUESTION)
        assert copied.text == plain.text
        decoding = copied.response_metadata["decoding"]
        assert decoding["drafter"] == "reference_copy"
        assert decoding["num_accepted"] > 12
        assert decoding["num_forwards"] < 12
        assert decoding["tokens_per_forward"] > 2
        assert decoding["num_drafted"] >= decoding["num_accepted"]


def test_a_prediction_is_copied_and_changes_no_answer(default_chat: ChatLocal, plain: AIMessage) -> None:
    chat = default_chat.model_copy(update={"max_tokens": 24})
    edited = plain.text.replace(" the ", " a ")
    begin, end = edited[:50], edited[50:]
    parts = [{"type": "text", "text": begin}, {"type": "text", "text": end}]
    forms: list[Any] = [edited, {"type": "content", "content": edited}, {"type": "content", "content": parts}]
    for prediction in forms:
        copied = chat.invoke(QUESTION, prediction=prediction)
        assert copied.text == plain.text
        assert copied.usage_metadata
        decoding = copied.response_metadata["decoding"]
        assert decoding["drafter"] == "reference_copy"
        assert decoding["num_forwards"] < 16
        told: Any = copied.usage_metadata["output_token_details"]
        assert told["accepted_prediction"] == decoding["num_accepted"]
        assert told["accepted_prediction"] + told["rejected_prediction"] == decoding["num_drafted"]
        assert decoding["acceptance"] == decoding["num_accepted"] / decoding["num_drafted"]
    first, *others = chat.stream(QUESTION, prediction=forms[2])
    streamed = add_ai_message_chunks(first, *others)
    assert streamed.text == plain.text
    assert streamed.usage_metadata == copied.usage_metadata
    unused = chat.invoke(QUESTION, prediction=edited, drafter="none")
    assert unused.text == plain.text
    assert unused.response_metadata["decoding"]["num_drafted"] == 0


def test_references_are_tokenized_once(chat: ChatLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat.engine.tokenizer
    encoded: list[str] = []
    encode = type(tokenizer).encode

    def counted(self: Any, text: str, *args: Any, **kwargs: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    texts = ["A text nobody has asked for before.", "And one more."]
    rows = [
        chat.engine.make_row([5, 6], lambda update: None, references=references)
        for references in (texts, References(texts), list(texts), tuple(texts))
    ]
    assert [text for text in encoded if text in texts] == texts
    assert all(row.references is rows[0].references for row in rows)


class _Tracer(BaseTracer):
    """Keeps every run it is told of, as a tracer that sends runs away would."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []

    def _persist_run(self, run: Run) -> None:
        self.runs.append(run)


class _Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.heard.append((args, kwargs))


class _Keys(InMemoryCache):
    """Keeps the keys of what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[tuple[str, str]] = []

    def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
        self.keys.append((prompt, llm_string))
        super().update(prompt, llm_string, return_val)


@pytest.mark.parametrize("told", ["list", "references", "prediction"])
async def test_traces_and_cache_keys_do_not_hold_the_texts(told: str, chat: ChatLocal) -> None:
    given: Any = {"list": {"references": [SECRET]}, "references": {"references": References([SECRET])}}
    arguments: dict[str, Any] = given.get(told) or {"prediction": SECRET}
    cache, tracer, listener = _Keys(), _Tracer(), _Listener()
    cached = chat.model_copy(update={"cache": cache, "max_tokens": 4})
    config: Any = {"callbacks": [tracer, listener]}
    bound = ChatPromptTemplate.from_messages([("user", "{question}")]) | cached.bind(**arguments)
    question = {"question": QUESTION}
    first = bound.invoke(question, config)
    before = chat.engine.stats.num_tokens
    assert (await bound.ainvoke(question, config)).text == first.text
    assert chat.engine.stats.num_tokens == before  # equal references, one cache entry
    assert len(cache.keys) == 1
    list(bound.stream(question, config))
    [chunk async for chunk in bound.astream(question, config)]
    cached.invoke(QUESTION, config, references=[SECRET, "another"])
    assert len(cache.keys) == 2
    handle = repr(References([SECRET]))
    assert "marmalade" not in repr(cache.keys)
    assert handle in repr(cache.keys)
    assert len(tracer.runs) == 5
    traced = repr([run.model_dump() for run in tracer.runs]) + repr(listener.heard)
    assert "marmalade" not in traced
    assert handle in traced


def test_the_cache_tells_models_and_stops_apart(chat: ChatLocal) -> None:
    cache = _Keys()
    models = [
        chat.model_copy(update={"cache": cache, **changes})
        for changes in ({}, {"stop": ["a"]}, {"stop": ["e"]}, {"temperature": 1.0}, {"max_tokens": 3})
    ]
    for model in models:
        model.invoke(QUESTION)
    assert len(cache.keys) == len(models)
    assert any("tests/tiny" in key for key in cache.keys[0])  # where the model lies


# What a call may ask -------------------------------------------------------------------------------


def test_what_would_be_passed_over_is_an_error(chat: ChatLocal) -> None:
    for arguments, words in (
        ({"max_token": 4}, r"unknown arguments \['max_token'\]; there are .*'max_tokens'"),
        ({"tools": [{"name": "search"}]}, "chat template takes no tools"),
        ({"functions": [{"name": "search"}]}, r"unknown arguments \['functions'\]"),
        ({"response_format": {"type": "yaml"}}, "response_format is .*'yaml'"),
        ({"model": "gpt-5"}, "runs 'tiny' and cannot switch to 'gpt-5'"),
        ({"stop": [""]}, "non-empty strings"),
        ({"references": SECRET}, "give a list of str"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction is a text, or .*5"),
        ({"prediction": [{"type": "image_url"}]}, "prediction is a text, or .*image_url"),
        ({"drafter": "fast"}, "no drafter is named 'fast'"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            chat.invoke(QUESTION, **arguments)  # type: ignore[arg-type]  # the mistakes under test
    assert chat.invoke(QUESTION, model="tiny", top_k=None, max_tokens=2).text
    off = {"repetition_penalty": 1.0, "n": 1, "top_k": -1, "logit_bias": {}, "mirostat": 0}  # change nothing
    assert chat.invoke(QUESTION, **off).text == chat.invoke(QUESTION).text  # type: ignore[arg-type]  # of any type
    for arguments in ({"repetition_penalty": 1.1}, {"n": 2}, {"skip_special_tokens": False}):
        with pytest.raises(ValueError, match=f"unknown arguments .*{next(iter(arguments))}"):
            chat.invoke(QUESTION, **arguments)  # type: ignore[arg-type]  # of any type
    # One string is one stop string, not one for each of its letters.
    whole = chat.invoke(QUESTION).text
    assert chat.invoke(QUESTION, stop=whole[30:36]).text == whole[: whole.index(whole[30:36])]  # type: ignore[arg-type]  # a string, as users write it


def test_logprobs_come_in_openais_shape(default_chat: ChatLocal) -> None:
    message = default_chat.invoke(QUESTION, logprobs=True, top_logprobs=2, max_tokens=8)
    content = message.response_metadata["logprobs"]["content"]
    assert len(content) == 8
    assert "".join(entry["token"] for entry in content) == message.text
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode())
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy
        assert (
            entry["top_logprobs"][1]["logprob"]
            <= entry["logprob"]
            == entry["top_logprobs"][0]["logprob"]
            <= 0
        )
    assert "logprobs" not in default_chat.invoke(QUESTION, max_tokens=2).response_metadata
    chunks = list(default_chat.stream(QUESTION, logprobs=True, max_tokens=6))
    assert "logprobs" not in chunks[0].response_metadata or len(chunks) == 1
    assert len(chunks[-1].response_metadata["logprobs"]["content"]) == 6


async def test_the_tokens_of_messages_are_counted_as_they_are_read(chat: ChatLocal) -> None:
    messages: list[BaseMessage] = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    usage = chat.invoke(messages, max_tokens=1).usage_metadata
    assert usage is not None
    assert chat.get_num_tokens_from_messages(messages) == usage["input_tokens"]
    assert chat.get_num_tokens(QUESTION) < usage["input_tokens"]
    with pytest.warns(UserWarning, match="calls no tools"):
        chat.get_num_tokens_from_messages(messages, tools=[{"name": "search"}])


def test_the_profile_says_what_it_can(chat: ChatLocal) -> None:
    assert chat.profile is not None
    assert chat.profile["max_input_tokens"] == 2048
    assert chat.profile["text_inputs"] is chat.profile["text_outputs"] is True
    assert chat.profile["structured_output"] is True
    assert not any(chat.profile[name] for name in ("image_inputs", "audio_inputs", "tool_calling"))  # type: ignore[literal-required]  # names checked one by one


# Configuration -------------------------------------------------------------------------------------


def test_configuring_does_not_load_weights_again(
    chat: ChatLocal, copying: ChatLocal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "local_backend.langchain.chat_local.load", lambda *_, **__: pytest.fail("weights were loaded")
    )
    configurable = chat.configurable_fields(
        temperature=ConfigurableField(id="temperature"), max_tokens=ConfigurableField(id="max_tokens")
    )
    before = chat.engine.stats.num_tokens
    short = configurable.with_config(configurable={"max_tokens": 3}).invoke(QUESTION)
    assert chat.engine.stats.num_tokens == before + 3
    assert short.usage_metadata is not None
    assert short.usage_metadata["output_tokens"] == 3
    hot = configurable.with_config(configurable={"temperature": 5.0}).invoke(QUESTION)
    assert hot.text != chat.invoke(QUESTION).text
    either = chat.configurable_alternatives(ConfigurableField(id="how"), default_key="plain", copying=copying)
    decodings = [
        either.with_config(configurable={"how": how})
        .invoke(QUESTION)
        .response_metadata["decoding"]["drafter"]
        for how in ("plain", "copying")
    ]
    assert decodings == ["autoregressive", "reference_copy"]


def test_retries_and_fallbacks(chat: ChatLocal) -> None:
    text = chat.invoke(QUESTION).text
    assert chat.with_retry(stop_after_attempt=2).invoke(QUESTION).text == text
    closed = tiny_chat()
    closed.close()
    assert closed.with_fallbacks([chat]).invoke(QUESTION).text == text
    assert chat.with_config(tags=["a"]).invoke(QUESTION).text == text


@pytest.mark.parametrize("max_concurrency", [None, 2])
async def test_batches_keep_their_order(chat: ChatLocal, max_concurrency: int | None) -> None:
    chat = chat.model_copy(update={"max_tokens": 30})
    questions = [f"{QUESTION} {'Really? ' * number}" for number in (5, 0, 3, 1, 4, 2)]
    alone = [chat.invoke(question).text for question in questions]
    config: Any = {"max_concurrency": max_concurrency} if max_concurrency else None
    most = 0
    step = chat.engine.step

    def watched() -> bool:
        nonlocal most
        is_more = step()
        most = max(most, chat.engine.num_rows)
        return is_more

    chat.engine.step = watched  # type: ignore[method-assign]  # only watched
    try:
        assert [message.text for message in chat.batch(questions, config)] == alone
        assert most <= max_concurrency if max_concurrency else most > 2
        assert [message.text for message in await chat.abatch(questions, config)] == alone
        assert most <= max_concurrency if max_concurrency else most > 2
        each = [{"tags": [str(number)]} for number in range(6)]
        assert [message.text for message in chat.batch(questions, each)] == alone  # type: ignore[arg-type]  # one config each
    finally:
        del chat.engine.step
    assert chat.batch([]) == []
    results = chat.batch([QUESTION, [], QUESTION], return_exceptions=True)
    assert [type(result) for result in results] == [AIMessage, ValueError, AIMessage]


# Ends and errors -----------------------------------------------------------------------------------


def test_a_stop_string_inside_a_draft_ends_the_answer_there(
    default_copying: ChatLocal, default_chat: ChatLocal, plain: AIMessage
) -> None:
    whole = plain.text
    for stop in (whole[50:53],):
        stopped = default_chat.invoke(QUESTION, stop=[stop])
        copied = default_copying.invoke(QUESTION, stop=[stop], references=[whole])
        assert copied.text == stopped.text == whole[: whole.index(stop)]
        assert copied.response_metadata["finish_reason"] == "stop"
        assert copied.usage_metadata
        assert stopped.usage_metadata
        assert copied.usage_metadata["output_tokens"] == stopped.usage_metadata["output_tokens"]
        streamed = [chunk.text for chunk in default_copying.stream(QUESTION, stop=[stop], references=[whole])]
        assert "".join(streamed) == stopped.text
    assert copied.response_metadata["decoding"]["num_accepted"] > 0


async def test_an_error_reaches_its_caller_alone(chat: ChatLocal) -> None:
    """Bad arguments, a processor and a listener that raise, a loop that is gone: beside good calls."""
    text = chat.invoke(QUESTION).text
    good = [asyncio.create_task(chat.ainvoke(QUESTION)) for _ in range(4)]
    bad = [
        asyncio.create_task(chat.ainvoke(QUESTION, stop=[""])),
        asyncio.create_task(chat.ainvoke("bread " * 3000)),
        asyncio.create_task(chat.ainvoke(QUESTION, temperature=-2.0)),
    ]

    def raises(*_: Any) -> Any:
        raise ArithmeticError("planted")

    prompt = chat_prompt(chat.engine.tokenizer, [{"role": "user", "content": QUESTION}])[0]
    with_processor = SamplingParams(max_tokens=9, logits_processors=(raises,))
    with pytest.raises(ArithmeticError, match="planted"):
        await asyncio.to_thread(chat.engine.generate, [prompt], with_processor)
    chat.engine.submit([chat.engine.make_row(prompt, raises, params=SamplingParams(max_tokens=9))])

    def leave_at_once() -> None:
        async def ask() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(chat.ainvoke(QUESTION), 0.01)

        asyncio.run(ask())  # the loop is closed while the engine still has news for it

    await asyncio.gather(*(asyncio.to_thread(leave_at_once) for _ in range(4)))
    errors = await asyncio.gather(*bad, return_exceptions=True)
    assert all(isinstance(error, ValueError) for error in errors)
    assert [message.text for message in await asyncio.gather(*good)] == [text] * 4
    await asyncio.to_thread(_wait_until_idle, chat.engine)


# Many at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [pytest.param("autoregressive", marks=pytest.mark.slow), "combined"])
async def test_64_threads_and_64_tasks_with_a_third_cancelled(drafter: str) -> None:
    rng = random.Random(8)
    with tiny_chat(drafter) as chat:
        # Half of the questions begin alike, lengths of prompt and answer differ.
        questions = [f"{QUESTION} {'Now. ' * rng.randrange(9)}{number % 9}" for number in range(18)]
        lengths = [rng.randrange(2, 26) for _ in questions]
        alone = [
            chat.invoke(question, max_tokens=length).text
            for question, length in zip(questions, lengths, strict=True)
        ]
        picks = [rng.randrange(len(questions)) for _ in range(128)]
        in_threads: dict[int, str] = {}
        left: set[int] = set()

        def call(number: int) -> None:
            pick = picks[number]
            pieces: list[str] = []
            for chunk in chat.stream(questions[pick], max_tokens=lengths[pick]):
                pieces.append(chunk.text)
                if number % 3 == 0 and len(pieces) >= 1 and lengths[pick] > 4:
                    left.add(number)
                    return
            in_threads[number] = "".join(pieces)

        async def task(number: int) -> str:
            pick = picks[number]
            message = await chat.ainvoke(questions[pick], max_tokens=lengths[pick])
            return message.text

        threads = [threading.Thread(target=call, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        tasks = {number: asyncio.create_task(task(number)) for number in range(64, 128)}
        cancelled = set(rng.sample(sorted(tasks), 21))
        for number in cancelled:
            asyncio.get_running_loop().call_later(rng.random() / 2, tasks[number].cancel)
        results = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        for thread in threads:
            await asyncio.to_thread(thread.join)
        for number, result in (*results.items(), *in_threads.items()):
            if isinstance(result, asyncio.CancelledError):
                assert number in cancelled
            else:
                assert result == alone[picks[number]], number
        assert len(in_threads) + len(left) == 64
        assert left
        await asyncio.to_thread(_wait_until_idle, chat.engine)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _memory_after(chat: ChatLocal, first: int, last: int) -> tuple[int, int]:
    """Traced Python memory and resident memory after requests ``first`` to ``last``, all different."""
    questions = [f"{number} ways to bake {number % 7} loaves" for number in range(first, last)]
    for start in range(0, len(questions), 50):
        chat.batch(questions[start : start + 50], max_tokens=3, references=[f"Reference {start}."])
    _wait_until_idle(chat.engine)
    gc.collect()
    return tracemalloc.get_traced_memory()[0], _resident_bytes()


@pytest.mark.parametrize(("few", "many"), [(60, 100), pytest.param(100, 500, marks=pytest.mark.slow)])
def test_memory_after_many_requests_is_what_it_was_after_few(few: int, many: int) -> None:
    """What is lost with requests is lost with each of them; what an allocator keeps once is not."""
    with tiny_chat("combined") as chat:
        tracemalloc.start()
        try:
            marks = [
                _memory_after(chat, first, last)
                for first, last in ((0, few), (few, many), (many, 2 * many - few))
            ]
        finally:
            tracemalloc.stop()
    growths = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)]
    assert min(traced for traced, _ in growths) < 2**20
    assert min(resident for _, resident in growths) < 16 * 2**20


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"unknown options \['temprature'\]"):
        ChatLocal.from_pretrained("model.gguf", temprature=0.5)
