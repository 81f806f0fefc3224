"""A loopback server that speaks OpenAI's and Anthropic's protocols at the pace of a hosted model.

It simulates a model's latency and an account's cache, limits and bill (:mod:`benchmarks.vendor_account`),
not what a model says: outlines, points and plain answers are filler of realistic length. It recognises
requests by their wording, so it works only with this project's prompts. Runs in a thread; nothing leaves the
machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.vendor_account import OPENAI_EARLIER, Charge, Prompt, PromptCache, RateLimits, Terms
from benchmarks.vendor_wires import ReplyStream
from sot_chains.calls.usage import num_tokens

_HEADINGS = (
    *("Clear goals", "Fewer meetings", "Short breaks", "Early hours", "One thing", "Plain lists"),
    *("Quiet rooms", "Good sleep", "Simple tools", "Honest refusals", "Weekly reviews", "Daily walks"),
)
_WORDS = (
    *("so", "that", "what", "matters", "is", "done", "first", "and", "the", "rest", "can", "wait"),
    *("then", "half", "of", "it", "may", "go", "to", "those", "who", "have", "more", "time"),
    *("than", "work", "on", "their", "desk", "since", "each", "hour", "counts", "once", "you", "know"),
    *("which", "task", "will", "pay", "for", "its", "cost", "or", "help", "most", "when", "plans"),
    *("change", "again", "as", "they", "often", "do", "in", "small", "teams", "with", "large", "aims"),
)
_NUM_OWN = 12  # words of a point: points that share all of them would be taken for one another
_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_POINT = re.compile(r"(?:Your point is|write only point) (\d+)\. (.*)")


@dataclass
class Pace:
    """How the server behaves.

    Attributes:
        first_token_seconds: Time from a request to its first token.
        tokens_per_second: Speed of one reply, independent of concurrent replies.
        num_points: Points in an outline.
        point_tokens: Tokens of every point, or of the first, the second and so on.
        requests_per_window: Requests beyond this number in ``window_seconds`` are refused with status 429.
        input_tokens_per_window: The same of input tokens.
        output_tokens_per_window: The same of output tokens.
        tokens_per_window: The same of both together.
        window_seconds: Length of that window.
        failing: A point whose heading contains this text gets status 500.
        cut_once: The first reply to a point whose heading contains this text breaks off in the middle.
        stalls_at: After so many tokens of a point the server writes nothing until the client has gone.
        num_busy: The next so many requests are answered with status 503.
        late_share: Share of requests that wait ten times as long for their first token.
        terms: How the vendor caches and counts.
        prompt_tokens_per_second: Speed at which what is not in the cache is read, before the first token.
        fast: How many times faster the fast tier is; ``None`` if the model has none.
    """

    first_token_seconds: float = 0.15
    tokens_per_second: float = 150.0
    num_points: int = 6
    point_tokens: int | Sequence[int] = 40
    requests_per_window: int | None = None
    input_tokens_per_window: int | None = None
    output_tokens_per_window: int | None = None
    tokens_per_window: int | None = None
    window_seconds: float = 1.0
    failing: str | None = None
    cut_once: str | None = None
    stalls_at: int | None = None
    num_busy: int = 0
    late_share: float = 0.0
    terms: Terms = OPENAI_EARLIER
    prompt_tokens_per_second: float | None = None
    fast: float | None = 2.5


@dataclass
class PacedServer:
    """A running server and its counters.

    Attributes:
        url: Base URL of the API.
        pace: How it behaves; may be changed while it runs.
        num_requests: Requests so far, refused ones included.
        num_refused: Requests refused with status 429.
        charges: What was billed, a line for each request that was answered.
        requests: The bodies of requests, in order of arrival.
        refusals: By which limit requests were refused.
        counted: When what was counted against the limits, by their names.
    """

    pace: Pace
    url: str = ""
    num_requests: int = 0
    num_refused: int = 0
    charges: list[Charge] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    counted: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self._cache = PromptCache(self.pace.terms)
        self._limits = RateLimits()

    @property
    def input_tokens(self) -> int:
        """Input tokens of all requests."""
        return sum(charge.input_tokens for charge in self.charges)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(charge.output_tokens for charge in self.charges)

    def count(self, **amounts: int) -> None:
        """Counts ``amounts`` against the limits, from now on."""
        now = time.monotonic()
        self._limits.spend(now, **amounts)
        self.counted.append((now, amounts))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        try:
            while request := await _read(reader):
                await self._answer(request, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client disconnected, or the server is stopping
        finally:
            writer.close()

    async def _answer(  # noqa: PLR0915 - one request from its reading to its end
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.num_requests += 1
        self.requests.append(request)
        now, pace, limits = asyncio.get_running_loop().time(), self.pace, self._limits
        limits.window_seconds = pace.window_seconds
        for name in ("requests", "tokens", "input_tokens", "output_tokens"):
            setattr(limits, name, getattr(pace, f"{name}_per_window"))
        try:
            prompt = Prompt.of(request, pace.terms)
        except ValueError as error:
            return await _refuse(writer, 400, str(error))
        wire, is_fast = pace.terms.wire, prompt.tier in ("fast", "priority")
        if is_fast and pace.fast is None:
            return await _refuse(writer, 400, f"'{prompt.tier}' is not supported by this model")
        if pace.num_busy > 0:
            pace.num_busy -= 1
            return await _refuse(writer, 503, "overloaded", {"retry-after-ms": "20"})
        counted = prompt.num_tokens - (
            0 if pace.terms.counts_reads else self._cache.num_readable(prompt, now)
        )
        if refused := limits.refused(now, counted):
            self.num_refused += 1
            self.refusals.append(refused[0])
            pause = {"retry-after-ms": f"{refused[1] * 1000:.0f}"}
            headers = pause | limits.headers(now, wire)
            return await _refuse(writer, 429, f"too many {refused[0]}", headers)
        tokens, point = self._reply(prompt.text), _find_point(prompt.text)
        heading = point[2] if point else ""
        self.count(requests=1)
        if pace.failing and pace.failing in heading:
            return await _refuse(writer, 500, "this point cannot be written")
        charge = self._cache.charge(prompt, now)
        charge.tier = ("priority" if wire == "openai" else "fast") if is_fast else None
        self.count(input_tokens=counted, tokens=counted)
        self.charges.append(charge)
        wait = pace.first_token_seconds * (10 if self._random.random() < pace.late_share else 1)
        if pace.prompt_tokens_per_second:
            wait += (charge.input_tokens - charge.cached_tokens) / pace.prompt_tokens_per_second
        await asyncio.sleep(wait)
        headers = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
        writer.write(_head(200, headers | limits.headers(time.monotonic(), wire)))
        most = next((request[name] for name in _BOUNDS if request.get(name)), len(tokens))
        stream = ReplyStream(request, charge, wire, writer)
        await stream.begin()
        charge.begin()
        is_cut = bool(pace.cut_once and pace.cut_once in heading)
        if is_cut:
            pace.cut_once, tokens = None, tokens[: len(tokens) // 2]
        said, number = "", 0
        async for token in _paced(tokens[:most], pace.tokens_per_second * (pace.fast or 1 if is_fast else 1)):
            if reader.at_eof():
                raise ConnectionError("the client has closed the stream")
            said += token
            num_new = num_tokens(said) - charge.output_tokens
            charge.output_tokens += num_new
            self.count(output_tokens=num_new, tokens=num_new)
            await stream.write(token)
            number += 1
            if point and number == pace.stalls_at:
                await reader.read(1)
        if is_cut:
            raise ConnectionError("the stream is to break off")
        await stream.end("length" if most < len(tokens) else "stop")

    def _reply(self, prompt: str) -> list[str]:
        if point := _find_point(prompt):
            return [*self._text(int(point[1])), "."]
        if "utline" in prompt:
            headings = [_HEADINGS[number % len(_HEADINGS)] for number in range(self.pace.num_points)]
            lines = [f"{number}. {heading}" for number, heading in enumerate(headings, 1)]
            return [token for line in lines for token in _split(f"{line}\n")]
        return [token for _ in range(self.pace.num_points) for token in (*self._text(1), ". ")]

    def _text(self, number: int) -> list[str]:
        """The words of a point."""
        lengths = self.pace.point_tokens
        length = lengths if isinstance(lengths, int) else lengths[(number - 1) % len(lengths)]
        words = random.Random(number)  # in no order that repeats, which would be taken for a loop
        own = words.sample(_WORDS, _NUM_OWN)
        return [f" {words.choice(own)}" for _ in range(length - 1)]


def _find_point(prompt: str) -> re.Match[str] | None:
    """The point that is asked for, which is the last one: examples ask for others before."""
    found = [*_POINT.finditer(prompt)]
    return found[-1] if found else None


def _split(text: str) -> list[str]:
    return re.findall(r"\s*\S+\s*$|\s*\S+", text)


async def _paced(tokens: list[str], per_second: float) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    for number, token in enumerate(tokens):
        if (wait := begin + number / per_second - loop.time()) > 0:
            await asyncio.sleep(wait)
        yield token


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The body of the next request on a connection, ``None`` once it is closed."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    except asyncio.IncompleteReadError:
        return None
    length = re.search(r"content-length: (\d+)", head)
    body = await reader.readexactly(int(length[1]) if length else 0)
    return dict(json.loads(body))


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\n{lines}\r\n".encode()


async def _refuse(
    writer: asyncio.StreamWriter, status: int, message: str, headers: dict[str, str] | None = None
) -> None:
    body = json.dumps({"type": "error", "error": {"type": "refused", "message": message}}).encode()
    told = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    writer.write(_head(status, told) + body)
    await writer.drain()


@contextmanager
def paced_server(**pace: Any) -> Iterator[PacedServer]:
    """Runs a server; see :class:`Pace` for the arguments."""
    server = PacedServer(Pace(**pace))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024)

    listening = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    root = "" if server.pace.terms.wire == "anthropic" else "/v1"
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}{root}"
    try:
        yield server
    finally:

        async def stop() -> None:
            listening.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
