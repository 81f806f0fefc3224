"""Replies as servers in the field send them: the right text and count, or an error that names its cause."""

import asyncio
import re
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import convert_to_messages
from langchain_openai import ChatOpenAI
from openai import RateLimitError
from pydantic import SecretStr

from sot_chains import ProviderError, Retries, SkeletonOfThought
from sot_chains.router import Route, Router
from tests.sot_chains.fakes import ANSWER, QUESTION, answer_to, is_skeleton_request, nothing_runs, sot_of
from tests.sot_chains.wire_server import (
    WIRES,
    Reply,
    WireServer,
    chunk,
    event,
    events,
    json_reply,
    text_delta,
    usage,
    whole_reply,
    wire_server,
)

AT_ONCE = Retries(max_attempts=3, first_pause_seconds=0.0)
TEXT = "Keep fixed hours."


class Plainly(Router):
    """Answers every question in one piece."""

    async def adecide(self, conversation: Any, config: Any) -> Route:
        return Route(False, "it is to be plain", 1.0, "plain")


def plain(server: WireServer, wire: str = "openai", **options: Any) -> SkeletonOfThought:
    return server.sot(wire, **{"router": Plainly(), "retries": AT_ONCE, **options})


def chat_openai(server: WireServer, **options: Any) -> ChatOpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return ChatOpenAI(
        model="m", base_url=url, api_key=SecretStr("k"), stream_usage=True, max_retries=0, **options
    )


def tokens(message: Any) -> tuple[int, int]:
    return message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]


def asked_for(request: dict[str, Any]) -> str:
    """What the fakes answer to a request on either wire."""
    return answer_to(convert_to_messages(request["messages"]))


async def cause_of(sot: SkeletonOfThought) -> str:
    """Why an answer failed, or has a beginning only."""
    try:
        message = await sot.ainvoke(QUESTION)
    except ProviderError as error:
        return str(error)
    return " ".join(failure["reason"] for failure in message.response_metadata["sot"]["failures"])


# --- counts


RUNNING = events(
    chunk("", usage=usage(20, 0)),
    *(chunk(word, usage=usage(20, number)) for number, word in enumerate(["Keep ", "fixed ", "hours."], 1)),
    chunk(None, "stop", usage=usage(20, 4)),
    {"choices": [], "usage": usage(20, 4)},
)


@pytest.mark.parametrize("listened", [False, True])
async def test_running_totals_are_not_added_up(listened: bool) -> None:
    handler = UsageMetadataCallbackHandler()
    async with wire_server(RUNNING) as server:
        message = await plain(server).ainvoke(QUESTION, {"callbacks": [handler] if listened else []})
        assert (message.text, tokens(message)) == (TEXT, (20, 4))
        assert message.response_metadata["sot"]["cost"]["reported"]["output_tokens"] == 4
        assert not listened or handler.usage_metadata["m"]["total_tokens"] == 24
        model = chat_openai(server)
        message = await sot_of(model, router=Plainly()).ainvoke(QUESTION)
        assert (message.text, tokens(message)) == (TEXT, (20, 4))
        await model.root_async_client.close()


async def test_totals_without_a_prompt_and_totals_in_any_order() -> None:
    counts = [usage(0, 1), usage(0, 3), usage(9, 5), usage(9, 2), {}, None, {"prompt_tokens": None}]
    async with wire_server(events(*(chunk("a", usage=c) for c in counts), chunk(None, "stop"))) as server:
        assert tokens(await plain(server).ainvoke(QUESTION)) == (9, 5)
    moonshot = chunk(None, "stop")
    moonshot["choices"][0]["usage"] = usage(3, 2)
    async with wire_server(events(chunk(TEXT), moonshot)) as server:
        assert tokens(await plain(server).ainvoke(QUESTION)) == (3, 2)
    async with wire_server(events(chunk(TEXT), chunk(None, "stop", usage=usage(0, 0)))) as server:
        trace = (await plain(server).ainvoke(QUESTION)).response_metadata["sot"]
        assert trace["plain_call"]["usage"] is None
        assert trace["usage"]["output_tokens"] == trace["cost"]["estimated"]["output_tokens"] > 0


async def test_a_message_at_the_end_of_a_stream_is_not_read_twice() -> None:
    for delta in ({"delta": {}}, {"delta": None}, {}):
        last = chunk(None, "stop")
        last["choices"] = [{**delta, "message": {"content": TEXT}, "index": 0, "finish_reason": "stop"}]
        async with wire_server(events(chunk(TEXT), last)) as server:
            assert (await plain(server).ainvoke(QUESTION)).text == TEXT
        async with wire_server(events(last)) as server:
            assert (await plain(server).ainvoke(QUESTION)).text == TEXT


@pytest.mark.parametrize(
    "last", [{"input_tokens": 0, "output_tokens": 3}, {"input_tokens": 12, "output_tokens": 3}]
)
async def test_the_larger_count_of_two_at_anthropic(last: dict[str, int]) -> None:
    started = {"input_tokens": 12, "output_tokens": 1, "cache_read_input_tokens": 5}
    reply = events(
        {"type": "message_start", "message": {"model": "m", "usage": started}},
        text_delta(TEXT),
        {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 2}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": last},
        {"type": "message_stop"},
        done=False,
    )
    async with wire_server(reply) as server:
        message = await plain(server, "anthropic").ainvoke(QUESTION)
        assert (message.text, tokens(message)) == (TEXT, (17, 3))


# --- errors that come with status 200

SAYINGS = [
    (
        {"error": {"message": "Provider returned error", "code": 502}},
        3,
        r"status 502: Provider returned error",
    ),
    ({"error": {"message": "Upstream died", "code": "503"}}, 3, r"status 503: Upstream died"),
    ({"error": {"message": "No such thing", "code": 404}}, 1, r"\(404\): No such thing"),
    (
        [{"error": {"code": 400, "message": "Bad role", "status": "INVALID_ARGUMENT"}}],
        1,
        r"\(400\): Bad role",
    ),
    (
        {"error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}},
        1,
        r"\(400\): prompt is",
    ),
    ({"error": "the request exceeds the available context size"}, 1, r"\(400\): the request exceeds"),
    (
        {"object": "error", "message": "maximum context length is 8", "type": "BadRequestError", "code": 400},
        1,
        "400",
    ),
    ({"error": {"type": "overloaded_error", "message": "Overloaded"}}, 3, r"status 529: Overloaded"),
    (
        {"error": {"message": "Provider returned error", "code": 400, "metadata": {"raw": "it was too hot"}}},
        1,
        r"\(400\): Provider returned error: it was too hot",
    ),
    ({"error": {"message": "context_length_exceeded", "code": "context_length_exceeded"}}, 1, r"\(400\)"),
    ({"error": {"message": "broke", "type": "server_error"}}, 3, "status 500: broke"),
]


def as_sent(said: Any, way: str, begun: bytes) -> Reply:
    """An error in one of the ways in which servers send it with status 200."""
    named = b"event: error\ndata: " + event(said).partition(b"data: ")[2]
    return {
        "body": json_reply(said),
        "event": events(said, done=False),
        "event with text": events(begun, said, done=False),
        "named event": events(named, done=False),
        "loose line": events(begun, json_reply(said).pieces[0] + b"\n", done=False),
    }[way]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("way", ["body", "event", "event with text", "named event", "loose line"])
async def test_an_error_with_status_200(wire: str, way: str) -> None:
    begun = event(text_delta("Keep ")) if wire == "anthropic" else event(chunk("Keep "))

    def reply(request: dict[str, Any], number: int) -> Reply:
        said, _, _ = SAYINGS[int(request["model"])]
        return as_sent(said, way, begun)

    async with wire_server(reply) as server:
        for number, (_, num_requests, words) in enumerate(SAYINGS):
            server.requests.clear()
            assert re.search(words, await cause_of(plain(server, wire, model=str(number))))
            assert len(server.requests) == num_requests
    assert await nothing_runs()


PAGE = (
    b"<html><head><title>Sign in</title><style>p {x: y}</style></head>\n"
    b"<body><p>Please sign in.</body></html>"
)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (PAGE, r"in place of a stream: Sign in Please sign in\.; check that base_url"),
        (b'{"status": "ok"}', "in place of a stream: .*ok"),
        (b"Service not found", "in place of a stream: Service not found"),
        (b'{"detail": "Method not allowed here"}', "in place of a stream: Method not allowed here"),
    ],
)
async def test_a_page_in_place_of_a_stream_is_asked_for_once(wire: str, body: bytes, words: str) -> None:
    async with wire_server(Reply([body[:9], body[9:]])) as server:
        assert re.search(words, await cause_of(plain(server, wire)))
        assert len(server.requests) == 1


async def test_words_of_an_error_page_are_its_text() -> None:
    async with wire_server(Reply([PAGE], status=403)) as server:
        assert re.search(r"\(403\): Sign in Please sign in\.$", await cause_of(plain(server)))


async def test_an_error_that_says_nothing_usable_is_a_break_and_an_error_that_is_null_is_none() -> None:
    async with wire_server(events(chunk(TEXT), {"error": {"message": "hm"}})) as server:
        assert re.search("broke off its answer: hm", await cause_of(plain(server)))
        assert len(server.requests) == 3
    async with wire_server(events(chunk(TEXT, error=None), chunk(None, "stop", error={}))) as server:
        assert (await plain(server).ainvoke(QUESTION)).text == TEXT
    gone = chunk(None, "error")
    gone["choices"][0]["error"] = {"code": 502, "message": "gone"}
    async with wire_server(events(chunk(TEXT), gone)) as server:
        assert re.search("status 502: gone", await cause_of(plain(server)))


async def test_a_reply_in_one_piece_is_a_reply() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    async with wire_server(json_reply({"choices": [choice], "usage": usage(5, 2)})) as server:
        got = await plain(server).ainvoke(QUESTION)
        assert (got.text, tokens(got)) == (TEXT, (5, 2))
    whole = {
        "type": "message",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 5, "output_tokens": 2},
    }
    async with wire_server(json_reply(whole)) as server:
        got = await plain(server, "anthropic").ainvoke(QUESTION)
        assert (got.text, tokens(got)) == (TEXT, (5, 2))


# --- limits and quotas


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}),
        (
            429,
            {
                "error": {
                    "message": "Billing hard limit has been reached",
                    "code": "billing_hard_limit_reached",
                }
            },
        ),
        (429, {"error": {"message": "no", "type": "insufficient_quota", "code": None}}),
        (
            400,
            {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": "Your credit balance is too low"},
            },
        ),
        (402, {"error": {"message": "Insufficient credits"}}),
        (403, {"error": {"message": "quota", "code": "insufficient_user_quota"}}),
    ],
)
@pytest.mark.parametrize("within", [False, True])
async def test_a_quota_that_is_used_up(wire: str, status: int, body: Any, within: bool) -> None:
    body["error"] |= {"code": body["error"].get("code") or status}
    reply = events(body, done=False) if within else json_reply(body, status, **{"retry-after": "3600"})
    async with wire_server(reply) as server:
        with pytest.raises(ProviderError, match=r"quota of the account .* is used up") as caught:
            await plain(server, wire).ainvoke(QUESTION)
        assert "limits=" not in str(caught.value)
        assert not caught.value.is_retryable
        assert len(server.requests) == 1


async def test_a_quota_that_refills_is_a_rate_limit() -> None:
    words = "You exceeded your current quota. Please retry in 0.1s."
    async with wire_server(json_reply({"error": {"message": words}}, 429)) as server:
        assert re.search("rate limit", await cause_of(plain(server)))
        assert len(server.requests) == 3


async def test_a_quota_of_a_langchain_model() -> None:
    body = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    async with wire_server(json_reply(body, 429)) as server:
        model = chat_openai(server)
        with pytest.raises(RateLimitError, match="exceeded your current quota"):
            await sot_of(model, retries=AT_ONCE).ainvoke(QUESTION)
        assert len(server.requests) == 1
        await model.root_async_client.close()


@pytest.mark.parametrize("wire", ["openai", "anthropic", "langchain"])
async def test_a_server_that_asks_to_wait_for_an_hour(wire: str) -> None:
    reply = json_reply({"error": {"message": "slow down"}}, 429, **{"retry-after": "3600"})
    async with wire_server(reply) as server:
        model = chat_openai(server) if wire == "langchain" else None
        sot = sot_of(model, router=Plainly()) if model else plain(server, wire, retries=None)
        with pytest.raises(ProviderError, match=r"slow down.*asks to wait 3600 s") as caught:
            await sot.ainvoke(QUESTION)
        assert caught.value.retry_after_seconds == 3600
        assert len(server.requests) == 1
        if model:
            await model.root_async_client.close()
            return
        # Until then nothing is sent, and that is said at once, too.
        with pytest.raises(ProviderError, match=r"asked to wait 3600 s, of which \d+ s are left"):
            await sot.ainvoke(QUESTION)
        assert len(server.requests) == 1


async def test_waits_are_logged_once_and_bounded_by_retries(caplog: pytest.LogCaptureFixture) -> None:
    refused = json_reply({"error": {"message": "slow down"}}, 429, **{"retry-after-ms": "5100"})
    async with wire_server(refused) as server:
        short = Retries(max_attempts=2, longest_wait_seconds=5.0)
        assert re.search(r"asks to wait 5.1 s.*now 5", await cause_of(plain(server, retries=short)))
        assert not caplog.records
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(plain(server, model="other").ainvoke(QUESTION), 0.5)
    (record,) = caplog.records
    assert "waiting 5 s: plain is retried after:" in record.message


# --- the end


@pytest.mark.parametrize("framing", ["chunked", "close"])
async def test_done_is_an_end_and_a_connection_that_closes_is_none(framing: Any) -> None:
    whole = events(chunk("Keep "), chunk("fixed hours."))
    async with wire_server(Reply(whole.pieces, framing=framing)) as server:
        message = await plain(server).ainvoke(QUESTION)
        assert message.text == TEXT
        assert message.response_metadata["sot"]["is_complete"]
        assert len(server.requests) == 1
    async with wire_server(Reply(whole.pieces[:-1], framing=framing)) as server:
        assert re.search("broke off", await cause_of(plain(server)))
        assert len(server.requests) == 3


async def test_done_without_a_blank_line_and_after_a_byte_order_mark() -> None:
    body = b"\xef\xbb\xbf" + event(chunk(TEXT)) + b"data:[DONE]"
    async with wire_server(Reply([bytes([byte]) for byte in body])) as server:
        assert (await plain(server).ainvoke(QUESTION)).text == TEXT


async def test_anthropics_stop_is_an_end() -> None:
    async with wire_server(events(text_delta(TEXT), {"type": "message_stop"}, done=False)) as server:
        assert (await plain(server, "anthropic").ainvoke(QUESTION)).text == TEXT
    async with wire_server(events(text_delta(TEXT), done=False)) as server:
        assert re.search("broke off", await cause_of(plain(server, "anthropic")))


async def test_an_end_without_a_word_is_no_answer() -> None:
    async with wire_server(events()) as server:
        assert re.search("broke off", await cause_of(plain(server)))
        assert len(server.requests) == 3
    async with wire_server(events(chunk(None, "content_filter"))) as server:
        assert re.search("wrote nothing; it ended with 'content_filter'", await cause_of(plain(server)))


@pytest.mark.parametrize("reason", ["", " ", "null", "stop"])
async def test_a_reason_in_every_chunk_is_none(reason: str) -> None:
    """Half a reply passes for no whole one, whatever its chunks say, and is asked for again."""
    halves = [chunk("Keep ", reason), chunk("fixed ", reason)]

    def reply(request: dict[str, Any], number: int) -> Reply:
        return events(*halves, chunk("hours.", reason)) if number else events(*halves, done=False)

    async with wire_server(reply) as server:
        assert (await plain(server).ainvoke(QUESTION)).text == TEXT
        assert len(server.requests) == 2


# --- what the text is


async def test_of_two_choices_the_first_is_the_answer() -> None:
    pieces = [chunk("X", index=1), chunk("Keep "), chunk("Y", "stop", index=1), chunk("fixed hours.")]
    both = chunk("Z", index=1)
    both["choices"].append(chunk(None, "stop")["choices"][0])
    async with wire_server(events(*pieces, both, {"choices": [], "usage": usage(4, 9)})) as server:
        message = await plain(server).ainvoke(QUESTION, n=2)
        assert (message.text, tokens(message)) == (TEXT, (4, 9))
        model = chat_openai(server)
        for chain, n in ((sot_of(model), {"n": 2}), (sot_of(model.bind(n=2)), {})):
            with pytest.raises(ValueError, match="n=2 asks for several choices"):
                await chain.ainvoke(QUESTION, **n)
        await model.root_async_client.close()


async def test_content_in_parts_and_characters_in_halves() -> None:
    parts = [{"type": "text", "text": "Well "}, {"type": "thinking", "thinking": []}]
    halves = [b'data: {"choices":[{"index":0,"delta":{"content":"done \\ud83d"}}]}\n\n']
    halves.append(b'data: {"choices":[{"index":0,"delta":{"content":"\\ude00 \\udc00"}}]}\n\n')
    async with wire_server(events({"choices": [{"delta": {"content": parts}}]}, *halves)) as server:
        assert (await plain(server).ainvoke(QUESTION)).text == "Well done \U0001f600 \ufffd"


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("question", ["How do I \ud83d\ude00 sleep \udc00 well?", [("user", "a\ud800")]])
async def test_a_lone_surrogate_is_cleaned(wire: str, question: Any) -> None:
    async with wire_server(lambda request, _: whole_reply(wire, asked_for(request))) as server:
        for router in ("always", "auto", Plainly()):
            await server.sot(wire, router=router).ainvoke(question)
        sent = str(server.requests)
    assert "\ufffd" in sent
    assert not any("\ud800" <= character <= "\udfff" for character in sent)


# --- reasoning, and replies that are cut


def thinking(finish: str = "length") -> Reply:
    thought: dict[str, Any] = {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm, let me think."}}]}
    return events(thought, chunk("", finish), {"choices": [], "usage": usage(5, 40)})


@pytest.mark.parametrize("stage", ["plain", "outline", "points"])
@pytest.mark.parametrize("model", ["named", "langchain"])
@pytest.mark.parametrize("reported", [True, False])
async def test_a_reply_that_is_only_reasoning(stage: str, model: str, reported: bool) -> None:
    silent = thinking() if reported else events(chunk("", "length", usage=usage(5, 40)))

    def reply(request: dict[str, Any], number: int) -> Reply:
        is_outline = is_skeleton_request(str(request["messages"][-1]["content"]))
        if stage == "points" and is_outline:
            return whole_reply("openai", asked_for(request))
        return silent

    async with wire_server(reply) as server:
        wrapped = chat_openai(server) if model == "langchain" else None
        router = Plainly() if stage == "plain" else "always"
        sot = sot_of(wrapped, router=router) if wrapped else server.sot(router=router)
        with pytest.raises(
            ProviderError, match=r"all of about 40 tokens went into reasoning.*'length'"
        ) as caught:
            await sot.ainvoke(QUESTION)
        assert caught.value.trace is not None
        assert caught.value.trace["usage"]["output_tokens"] >= 40
        with pytest.raises(ProviderError, match="went into reasoning"):
            [chunk async for chunk in sot.astream(QUESTION)]
        if wrapped:
            await wrapped.root_async_client.close()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("finish", ["length", "max_tokens", "content_filter", "refusal"])
async def test_points_that_are_cut(wire: str, finish: str) -> None:
    def reply(request: dict[str, Any], number: int) -> Reply:
        text = asked_for(request)
        is_first = number == 1
        return whole_reply(wire, text[:-4] if is_first else text, finish=finish if is_first else None)

    async with wire_server(reply) as server:
        trace = (await server.sot(wire).ainvoke(QUESTION)).response_metadata["sot"]
    assert not trace["is_complete"]
    (failure,) = trace["failures"]
    assert failure["status"] == "cut"
    assert f"it ended with '{finish}'" in failure["reason"]
    assert sorted(point["status"] for point in trace["points"]) == ["complete", "complete", "cut"]


@pytest.mark.parametrize("wire", WIRES)
async def test_a_plain_answer_that_is_cut(wire: str) -> None:
    async with wire_server(whole_reply(wire, "Keep fixed", finish="length")) as server:
        message = await plain(server, wire).ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert message.text == "Keep fixed"
    assert not trace["is_complete"]
    assert [failure["status"] for failure in trace["failures"]] == ["cut"]


@pytest.mark.parametrize("eager", [False, True])
async def test_an_outline_that_is_cut_leaves_its_last_heading_out(eager: bool) -> None:
    def reply(request: dict[str, Any], number: int) -> Reply:
        text = asked_for(request)
        if number:
            return whole_reply("openai", text)
        return whole_reply("openai", f"{text}\n4. Warm mi", finish="length")

    async with wire_server(reply) as server:
        message = await server.sot(eager=eager).ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert trace["skeleton"] == ["Fixed hours", "Dark room", "Less coffee"]
    assert not trace["is_complete"]
    assert message.text == ANSWER


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "said", ["This model's maximum context length is 8 tokens", "prompt is too long: 9 > 8"]
)
async def test_a_prompt_that_is_too_long_is_langchains_error(wire: str, said: str) -> None:
    async with wire_server(json_reply({"error": {"message": said}}, 400)) as server:
        with pytest.raises(ContextOverflowError, match=said) as raised:
            await server.sot(wire).ainvoke(QUESTION)
        assert isinstance(raised.value, ProviderError)
        with pytest.raises(ContextOverflowError):
            await server.sot(wire, router=Plainly()).ainvoke(QUESTION)
