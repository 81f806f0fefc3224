"""Servers that behave at random: each answer is the right text and count, or an error with its cause."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from langchain_core.messages import convert_to_messages

from sot_chains import ProviderError, Retries
from sot_chains.calls.usage import NO_TOKENS
from tests.sot_chains.fakes import ANSWER, QUESTION, answer_to
from tests.sot_chains.providers.test_replies import Plainly
from tests.sot_chains.wire_server import WIRES, Reply, WireServer, json_reply, wire_server

RETRIES = Retries(max_attempts=3, first_pause_seconds=0.0)
WORDS = [
    "sleep",
    "well,",
    "“tonight”",
    "\u2028",
    "🎉",
    "schön",
    "眠る",
    '{"a": "b"}',
    "data: x",
    "\n\n",
    "</p>",
]
NOTHING = b""


@dataclass
class Fault:
    """What goes wrong with a reply.

    Attributes:
        cause: What an error says of it, as a pattern.
        is_passing: Whether the request is worth sending again.
        apply: Makes the faulty reply from the pieces of a whole one.
    """

    cause: str
    is_passing: bool
    apply: Callable[[Random, list[bytes]], Reply]


def _cut(random: Random, pieces: list[bytes]) -> list[bytes]:
    """The beginning of a reply, without what could pass for its end."""
    is_end = re.compile(rb'\[DONE\]|message_stop|"(finish|stop)_reason": "[a-z]')
    first = next(number for number, piece in enumerate([*pieces, b"[DONE]"]) if is_end.search(piece))
    return pieces[: random.randint(0, first)]


def _then(*more: bytes, ends: bool = True) -> Callable[[Random, list[bytes]], Reply]:
    return lambda random, pieces: Reply([*_cut(random, pieces), *more], ends=ends)


def _said(error: Any) -> bytes:
    return f"event: error\ndata: {json.dumps(error)}\n\n".encode()


def _broken_json(random: Random, pieces: list[bytes]) -> Reply:
    return Reply([*_cut(random, pieces), b'event: message_start\ndata: {"choices": [{"de\n\n'])


FAULTS = [
    Fault("broke off", True, _then()),
    Fault("broke off|no connection", True, _then(ends=False)),
    Fault("broke off", True, _broken_json),
    Fault("broke off", True, _then(b'event: message_start\ndata: {"a": "\xff\xfe"}\n\n')),
    Fault(
        "status 502: upstream died", True, _then(_said({"error": {"code": 502, "message": "upstream died"}}))
    ),
    Fault(
        "529: too busy", True, _then(_said({"error": {"type": "overloaded_error", "message": "too busy"}}))
    ),
    Fault("broke off.*it hiccuped", True, _then(_said({"error": {"message": "it hiccuped"}}))),
    Fault(
        r"\(400\): no such field", False, _then(_said({"error": {"code": 400, "message": "no such field"}}))
    ),
    Fault(r"\(400\).*context window", False, _then(_said({"error": "the context window is exceeded"}))),
    Fault("is used up", False, _then(_said({"error": {"code": "insufficient_quota", "message": "empty"}}))),
    Fault("broke off|no connection", True, lambda random, pieces: Reply([b""], ends=False, framing="length")),
    Fault("broke off", True, lambda random, pieces: Reply([b""])),
    Fault("place of a stream: Log in", False, lambda random, pieces: Reply([b"<html>", b"<p>Log in</p>"])),
    Fault("status 503: busy", True, lambda random, pieces: json_reply({"error": {"message": "busy"}}, 503)),
    Fault(
        r"\(404\): no model",
        False,
        lambda random, pieces: json_reply({"error": {"message": "no model"}}, 404),
    ),
    Fault(
        "status 500: oh", True, lambda random, pieces: json_reply({"error": {"code": 500, "message": "oh"}})
    ),
    Fault(
        "refuses the API key", False, lambda random, pieces: json_reply({"error": {"message": "who?"}}, 401)
    ),
    Fault(
        "asks to wait 999 s",
        False,
        lambda random, pieces: json_reply({"error": {"message": "slow"}}, 429, **{"retry-after": "999"}),
    ),
]


@dataclass
class Behaviour:
    """How one server answers, drawn from a seed."""

    seed: int
    random: Random = field(init=False)
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        random = self.random
        self.wire = random.choice(WIRES)
        self.is_plain = random.random() < 0.8
        self.text = " ".join(random.choices(WORDS, k=random.randint(1, 12))) + " End."
        self.counts = random.choice([None, (random.randint(1, 99), random.randint(1, 99))])
        self.fault = random.choice(FAULTS) if self.is_plain and random.random() < 0.5 else None
        self.num_faults = random.choice([1, 2, 99])

    @property
    def cause(self) -> str | None:
        """What the error says; ``None`` if the answer is whole in the end."""
        if self.fault is None or (self.fault.is_passing and self.num_faults < RETRIES.max_attempts):
            return None
        return self.fault.cause

    def reply(self, request: dict[str, Any]) -> Reply:
        """The response to the next request."""
        self.num_requests += 1
        text = self.text if self.is_plain else answer_to(convert_to_messages(request["messages"]))
        pieces = self._openai(text) if self.wire == "openai" else self._anthropic(text)
        if self.fault and self.num_requests <= self.num_faults:
            reply = self.fault.apply(self.random, pieces)
        else:
            reply = Reply(pieces)
        if self.random.random() < 0.5 or reply.framing == "length":
            return self._cut_anywhere(reply)
        return replace(self._cut_anywhere(reply), framing=self.random.choice(["chunked", "close"]))

    def _cut_anywhere(self, reply: Reply) -> Reply:
        body = b"".join(reply.pieces)
        if self.random.random() < 0.3 and reply.status == 200:
            body = body.replace(b"\n", b"\r\n")
        if self.random.random() < 0.1:
            body = b"\xef\xbb\xbf" + body if body.startswith(b"data") else body
        places = sorted(self.random.choices(range(len(body) + 1), k=self.random.choice([0, 3, 40])))
        pieces = [body[begin:end] for begin, end in zip([0, *places], [*places, len(body)], strict=True)]
        return replace(reply, pieces=pieces)

    def _split(self, text: str) -> list[str]:
        """``text`` in pieces, perhaps between the halves of a character."""
        units = text.encode("utf-16-le")
        places = sorted(self.random.choices(range(len(units) // 2 + 1), k=self.random.randint(0, 8)))
        ends = zip([0, *places], [*places, len(units) // 2], strict=True)
        return [units[2 * begin : 2 * end].decode("utf-16-le", "surrogatepass") for begin, end in ends]

    def _event(self, payload: dict[str, Any]) -> bytes:
        random = self.random
        noise = {"id": None, "error": None, "x_extra": {"usage": 7}, "created": "now", "obfuscation": "a: b"}
        payload = {**payload, **dict(random.sample(list(noise.items()), k=random.randint(0, 2)))}
        before = random.choice(
            [b"", b"", b": keep-alive\n\n", b"event: ping\ndata: {}\n\n", b"id: 7\nretry: 9\n"]
        )
        name = f"event: {payload['type']}\n".encode() if "type" in payload and random.random() < 0.8 else b""
        data = json.dumps(payload, ensure_ascii=random.random() < 0.5 or "\\ud" in json.dumps(payload))
        return before + name + (b"data:" if random.random() < 0.2 else b"data: ") + data.encode() + b"\n\n"

    def _openai(self, text: str) -> list[bytes]:
        random, counts = self.random, self.counts
        nothing: Any = random.choice([None, "", None])
        total = (
            {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
            if counts
            else None
        )
        runs = bool(total) and random.random() < 0.3
        chunks: list[dict[str, Any]] = []

        def add(finish: Any, index: Any = 0, **delta: Any) -> None:
            choice = {"index": index, "delta": delta, "finish_reason": finish}
            if index is None:
                del choice["index"]
            chunks.append(
                {
                    "choices": [choice],
                    **({"usage": {**total, "completion_tokens": 1}} if runs and total else {}),
                }
            )

        if random.random() < 0.5:
            add(nothing, role="assistant", content="")
        if random.random() < 0.2:
            chunks.append({"choices": [], "prompt_filter_results": []})
        for piece in self._split(text):
            add(nothing, random.choice([0, None]), content=piece)
            if random.random() < 0.1:
                add(random.choice([None, "stop"]), 1, content="the other choice")
            if random.random() < 0.1:
                add(nothing, reasoning_content="hm")
        has_reason = random.random() < 0.8
        if has_reason:
            add("stop")
        if total:
            with_usage = {"choices": [], "usage": total}
            chunks.insert(
                len(chunks) if random.random() < 0.7 else random.randint(0, len(chunks)), with_usage
            )
        is_done = not has_reason or random.random() < 0.7
        return [*map(self._event, chunks), *([b"data: [DONE]\n\n"] if is_done else [])]

    def _anthropic(self, text: str) -> list[bytes]:
        random, (num_in, num_out) = self.random, self.counts or (0, 0)
        started = {"input_tokens": num_in, "output_tokens": min(1, num_out)} if self.counts else None
        ended = {
            "output_tokens": num_out,
            **random.choice([{}, {"input_tokens": 0}, {"input_tokens": num_in}]),
        }
        payloads: list[dict[str, Any]] = [
            {"type": "message_start", "message": {"model": "m", "usage": started}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        ]
        for piece in self._split(text):
            payloads.append({"type": "content_block_delta", "delta": {"type": "text_delta", "text": piece}})
            if random.random() < 0.1:
                payloads.append(
                    {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}}
                )
            if random.random() < 0.1:
                payloads.append({"type": "some_new_event", "delta": {"text": 7}})
        payloads.append({"type": "content_block_stop", "index": 0})
        has_reason = random.random() < 0.8
        reason = {"stop_reason": "end_turn" if has_reason else None}
        payloads.append({"type": "message_delta", "delta": reason, "usage": ended if self.counts else None})
        if not has_reason or random.random() < 0.8:
            payloads.append({"type": "message_stop"})
        return [self._event(payload) for payload in payloads]


async def check(behaviour: Behaviour, server: WireServer) -> None:
    """Asks one question of a server that behaves so."""
    router = Plainly() if behaviour.is_plain else "always"
    sot = server.sot(behaviour.wire, f"m{behaviour.seed}", router=router, retries=RETRIES)
    async with asyncio.timeout(20):
        (message,) = await sot.abatch([QUESTION], return_exceptions=True)
    if isinstance(message, BaseException):
        assert isinstance(message, ProviderError), message
        assert behaviour.cause, message
        assert re.search(behaviour.cause, str(message)), message
        return
    trace = message.response_metadata["sot"]
    if behaviour.cause:  # what was written before is kept, and told apart
        assert re.search(behaviour.cause, trace["failures"][0]["reason"]), trace["failures"]
        assert message.text.strip()
        assert behaviour.text.strip().startswith(message.text.strip().rstrip("\ufffd"))
        return
    assert trace["is_complete"]
    assert message.text.strip() == (behaviour.text.strip() if behaviour.is_plain else ANSWER)
    num_calls = 1 if behaviour.is_plain else 4
    num_in, num_out = behaviour.counts or (0, 0)
    reported, estimated = trace["cost"]["reported"], trace["cost"]["estimated"] or NO_TOKENS
    assert (reported["input_tokens"], reported["output_tokens"]) == (num_in * num_calls, num_out * num_calls)
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == reported["output_tokens"] + estimated["output_tokens"]


async def survive(seeds: Iterable[int]) -> None:
    behaviours = {f"m{seed}": Behaviour(seed) for seed in seeds}

    def reply(request: dict[str, Any], number: int) -> Reply:
        return behaviours[request["model"]].reply(request)

    async with wire_server(reply) as server:
        for behaviour in behaviours.values():
            try:
                await check(behaviour, server)
            except Exception as error:
                error.add_note(f"seed {behaviour.seed}")
                raise


async def test_150_behaviours() -> None:
    await survive([*range(150), 417])  # 417 fails after blanks alone


@pytest.mark.slow
async def test_2000_behaviours() -> None:
    await survive(range(2000))
