"""A server on loopback that sends what a test tells it to, byte for byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from sot_chains import SkeletonOfThought, close_clients
from sot_chains.aio.blocking import cancel_and_wait
from tests.sot_chains.fakes import sot_of

WIRES = ["openai", "anthropic"]


@dataclass
class Reply:
    """One HTTP response.

    Attributes:
        pieces: Its body, in the pieces in which it is sent.
        ends: Whether the body comes to its end as HTTP has it; else the connection is cut after the pieces.
        framing: How HTTP tells its end.
    """

    pieces: Sequence[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ends: bool = True
    framing: Literal["chunked", "length", "close"] = "chunked"


def events(*payloads: Any, done: bool = True) -> Reply:
    """A stream of events: JSON values, or bytes as they are."""
    pieces = [p if isinstance(p, bytes) else event(p) for p in payloads]
    return Reply(
        [*pieces, b"data: [DONE]\n\n"] if done else pieces, headers={"Content-Type": "text/event-stream"}
    )


def event(payload: Any) -> bytes:
    name = payload.get("type", "") if isinstance(payload, dict) else ""
    named = f"event: {name}\n" if isinstance(name, str) and name else ""
    return f"{named}data: {json.dumps(payload)}\n\n".encode()


def json_reply(payload: Any, status: int = 200, **headers: str) -> Reply:
    """A JSON body in one piece."""
    body = json.dumps(payload, indent=1).encode()
    return Reply([body], status, {"Content-Type": "application/json", **headers}, framing="length")


def chunk(text: str | None = None, finish: Any = None, *, index: Any = 0, **fields: Any) -> dict[str, Any]:
    """One of OpenAI's chunks."""
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}], "model": "m", **fields}


def usage(num_in: int, num_out: int) -> dict[str, int]:
    """Counts in OpenAI's form."""
    return {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out}


def whole_reply(
    wire: str, text: str, *, num_in: int = 7, num_out: int = 3, finish: str | None = None
) -> Reply:
    """A reply as it should be, in two pieces of text."""
    half = len(text) // 2
    if wire == "openai":
        pieces = [chunk(text[:half]), chunk(text[half:]), chunk(None, finish or "stop")]
        return events(*pieces, {"choices": [], "usage": usage(num_in, num_out)})
    return events(
        {"type": "message_start", "message": {"usage": {"input_tokens": num_in, "output_tokens": 1}}},
        *(text_delta(piece) for piece in (text[:half], text[half:])),
        {
            "type": "message_delta",
            "delta": {"stop_reason": finish or "end_turn"},
            "usage": {"output_tokens": num_out},
        },
        {"type": "message_stop"},
        done=False,
    )


def text_delta(text: str) -> dict[str, Any]:
    """One of Anthropic's deltas."""
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


@dataclass
class WireServer:
    """The running server.

    Attributes:
        reply: Makes the response to a request, from its JSON and its number.
    """

    port: int
    reply: Callable[[dict[str, Any], int], Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: set[asyncio.Task[Any]] = field(default_factory=set)

    def sot(self, wire: str = "openai", model: str = "m", **options: Any) -> SkeletonOfThought:
        """A chain over a model here, which answers every question point by point."""
        url = f"http://127.0.0.1:{self.port}" + ("/v1" if wire == "openai" else "")
        return sot_of(f"{wire}:{model}", base_url=url, api_key="k", **{"prefill": False, **options})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if task := asyncio.current_task():
            self.connections.add(task)
        # A cancelled connection ends well, or asyncio logs it as an error.
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                while await self._exchange(reader, writer):
                    pass
            finally:
                writer.close()
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; returns whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split("\r\n")[0])
        request = json.loads(await reader.readexactly(length))
        self.requests.append(request)
        reply = self.reply(request, len(self.requests) - 1)
        body = b"".join(reply.pieces)
        framed = {"chunked": "Transfer-Encoding: chunked", "close": "Connection: close"}
        lines = [f"HTTP/1.1 {reply.status} X", *(f"{name}: {value}" for name, value in reply.headers.items())]
        lines.append(framed.get(reply.framing, f"Content-Length: {len(body) + (not reply.ends)}"))
        writer.write("\r\n".join([*lines, "", ""]).encode())
        for piece in filter(None, reply.pieces):
            writer.write(
                f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if reply.framing == "chunked" else piece
            )
            await writer.drain()
            await asyncio.sleep(0)  # the reader's turn: what is written at once arrives as one
        if reply.ends and reply.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return reply.ends and reply.framing != "close"


@asynccontextmanager
async def wire_server(reply: Callable[[dict[str, Any], int], Reply] | Reply) -> AsyncIterator[WireServer]:
    """Serves ``reply``, or what it returns, while the block runs."""
    make = (lambda _request, _number: reply) if isinstance(reply, Reply) else reply
    server = WireServer(0, make)
    running = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = running.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        await close_clients()
        running.close()
        await cancel_and_wait(server.connections)
