"""A loopback server that speaks OpenAI's chat protocol at the pace of a hosted model.

It simulates a model's latency and an account's limits, not what a model says: outlines, points and plain
answers are filler of realistic length. It recognises requests by their wording, so it works only with this
project's prompts. Runs in a thread; nothing leaves the machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_HEADINGS = ("Clear goals", "Fewer meetings", "Short breaks", "Early hours", "One thing", "Plain lists")
_WORDS = (
    "so",
    "that",
    "what",
    "matters",
    "is",
    "done",
    "first",
    "and",
    "the",
    "rest",
    "can",
    "wait",
    "a",
    "while",
)
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
        window_seconds: Length of that window.
        failing: A point whose heading contains this text gets status 500.
        late_share: Share of requests that wait ten times as long for their first token.
    """

    first_token_seconds: float = 0.15
    tokens_per_second: float = 150.0
    num_points: int = 6
    point_tokens: int | Sequence[int] = 40
    requests_per_window: int | None = None
    window_seconds: float = 1.0
    failing: str | None = None
    late_share: float = 0.0


@dataclass
class PacedServer:
    """A running server and its counters.

    Attributes:
        url: Base URL of the API.
        pace: How it behaves; may be changed while it runs.
        num_requests: Requests so far, refused ones included.
        num_refused: Requests refused with status 429.
    """

    pace: Pace
    url: str = ""
    num_requests: int = 0
    num_refused: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    _starts: deque[float] = field(default_factory=deque)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        try:
            while request := await _read(reader):
                await self._answer(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client disconnected, or the server is stopping
        finally:
            writer.close()

    async def _answer(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        now, pace = asyncio.get_running_loop().time(), self.pace
        while self._starts and now - self._starts[0] >= pace.window_seconds:
            self._starts.popleft()
        if pace.requests_per_window is not None and len(self._starts) >= pace.requests_per_window:
            self.num_refused += 1
            wait = self._starts[0] + pace.window_seconds - now
            return await _refuse(writer, 429, "too many requests", f"retry-after-ms: {wait * 1000:.0f}\r\n")
        self._starts.append(now)
        prompt = "".join(str(message["content"]) for message in request["messages"])
        tokens = self._reply(prompt)
        if pace.failing and (point := _POINT.search(prompt)) and pace.failing in point[2]:
            return await _refuse(writer, 500, "this point cannot be written")
        await asyncio.sleep(pace.first_token_seconds * (10 if self._random.random() < pace.late_share else 1))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        num_in = len(prompt) // 4
        self.input_tokens += num_in
        self.output_tokens += len(tokens)
        async for token in _paced(tokens, pace.tokens_per_second):
            await _send(writer, request, choices=[{"index": 0, "delta": {"content": token}}])
        await _send(writer, request, choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        usage = {
            "prompt_tokens": num_in,
            "completion_tokens": len(tokens),
            "total_tokens": num_in + len(tokens),
        }
        await _send(writer, request, choices=[], usage=usage)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def _reply(self, prompt: str) -> list[str]:
        if point := _POINT.search(prompt):
            return [*self._text(int(point[1])), "."]
        if "utline" in prompt:
            lines = [
                f"{number}. {_HEADINGS[(number - 1) % 6]}" for number in range(1, self.pace.num_points + 1)
            ]
            return [token for line in lines for token in _split(f"{line}\n")]
        return [token for _ in range(self.pace.num_points) for token in (*self._text(1), ". ")]

    def _text(self, number: int) -> list[str]:
        """The words of a point."""
        lengths = self.pace.point_tokens
        length = lengths if isinstance(lengths, int) else lengths[(number - 1) % len(lengths)]
        words = random.Random(number)  # in no order that repeats, which would be taken for a loop
        return [f" {words.choice(_WORDS)}" for _ in range(length - 1)]


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


async def _refuse(writer: asyncio.StreamWriter, status: int, message: str, headers: str = "") -> None:
    body = json.dumps({"error": {"message": message}})
    head = (
        f"HTTP/1.1 {status} No\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}"
    )
    writer.write(f"{head}\r\n{body}".encode())
    await writer.drain()


async def _send(writer: asyncio.StreamWriter, request: dict[str, Any], **fields: Any) -> None:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": request["model"], **fields}
    data = f"data: {json.dumps(chunk)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
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
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
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
