"""What the server costs: many clients at once over a paced upstream, against asking the chain directly.

Three processes: the upstream (:mod:`benchmarks.paced_server`), the server, and this one with the clients,
which speak over plain sockets so that they cost little. Directly, the chain runs in this process. Both read
streams to their end; the two take turns in going first, and each has a warm-up that is not counted. On
fewer than three cores the processes wait for each other, so the CPU time of that with the chain is told, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.paced_server import paced_server
from benchmarks.results import save
from sot_chains import SkeletonOfThought, make_provider

_QUESTION = "How do I get more done in a day? This is question {number}."
_MODEL = "openai:paced"


def _upstream(ready: Connection, pace: dict[str, Any]) -> None:
    with paced_server(**pace) as server:
        ready.send(server.url)
        ready.recv()


def _serve(ready: Connection, upstream: str) -> None:
    import uvicorn

    from sot_chains.serving.app import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            ready.send((self.servers[0].sockets[0].getsockname()[1], os.getpid()))

    app = create_app(make_provider(_MODEL, base_url=upstream))
    config = uvicorn.Config(app, port=0, log_level="error", log_config=None, ws="none", backlog=2048)
    Server(config).run()


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Runs ``target`` in a process of its own; yields the first thing it sends."""
    ours, theirs = multiprocessing.Pipe()
    running = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments))
    running.start()
    try:
        yield ours.recv()
    finally:
        running.terminate()
        running.join()


async def read_stream(port: int, question: str) -> AsyncIterator[bytes]:
    """What the server sends of an answer to ``question``."""
    asked = {"model": "paced:sot", "messages": [{"role": "user", "content": question}], "stream": True}
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
    try:
        while data := await reader.read(65_536):
            yield data
    finally:
        writer.close()


async def _ask_server(port: int, question: str) -> float | None:
    first, last = None, b""
    begin = time.perf_counter()
    async for data in read_stream(port, question):
        if first is None and b'"content": "1' in data:
            first = time.perf_counter() - begin
        last = (last + data)[-64:]
    assert b"[DONE]" in last, last
    return first


async def _ask_chain(chain: SkeletonOfThought, question: str) -> float | None:
    first = None
    begin = time.perf_counter()
    async for chunk in chain.astream(question):
        if first is None and chunk.content:
            first = time.perf_counter() - begin
    return first


async def at_once(
    ask: Callable[[str], Awaitable[float | None]], num_clients: int, pid: int | None = None
) -> dict[str, float]:
    """Asks ``num_clients`` questions at once; ``pid`` is the process with the chain, by default this one."""
    seconds: list[float] = []
    firsts: list[float] = []

    async def one(number: int) -> None:
        begin = time.perf_counter()
        first = await ask(_QUESTION.format(number=number))
        seconds.append(time.perf_counter() - begin)
        firsts.append(first or seconds[-1])

    begin, cpu = time.perf_counter(), _cpu_seconds(pid or os.getpid())
    await asyncio.gather(*map(one, range(num_clients)))
    return {
        "all_seconds": time.perf_counter() - begin,
        "median_seconds": statistics.median(seconds),
        "median_first_text_seconds": statistics.median(firsts),
        "cpu_seconds": _cpu_seconds(pid or os.getpid()) - cpu,
    }


def _cpu_seconds(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


async def measure(
    port: int, pid: int, upstream: str, num_clients: int, repeats: int
) -> dict[str, list[dict[str, float]]]:
    """What each repeat took, for both; the two alternate."""
    chain = SkeletonOfThought(make_provider(_MODEL, base_url=upstream), router="always")
    ways: dict[str, Callable[[str], Awaitable[float | None]]] = {
        "direct": lambda question: _ask_chain(chain, question),
        "server": lambda question: _ask_server(port, question),
    }
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way in sorted(ways, reverse=bool(repeat % 2)):
            server = pid if way == "server" else None
            measured = await at_once(ways[way], num_clients if repeat else 10, server)
            if repeat:
                runs[way].append(measured)
    return runs


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure over ``runs``."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def overhead(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """How much longer the server takes: the median over the repeats, each against its neighbour."""
    pairs = zip(runs["server"], runs["direct"], strict=True)
    return medians([{name: server[name] / direct[name] - 1 for name in direct} for server, direct in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tokens-per-second", type=float, default=20.0, help="of one upstream reply")
    parser.add_argument("--first-token-seconds", type=float, default=0.5)
    parser.add_argument("--point-tokens", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="keep a result file")
    options = parser.parse_args()
    pace = {
        "tokens_per_second": options.tokens_per_second,
        "first_token_seconds": options.first_token_seconds,
        "point_tokens": options.point_tokens,
    }
    with process(_upstream, pace) as upstream, process(_serve, upstream) as (port, pid):
        runs = asyncio.run(measure(port, pid, upstream, options.clients, options.repeats))
    measured = {way: medians(many) for way, many in runs.items()}
    table = Table(title=f"{options.clients} at once")
    for name in ("", "all done, s", "median, s", "median first text, s", "CPU, s"):
        table.add_column(name, justify="right")
    for way, figures in measured.items():
        table.add_row(way, *(f"{value:.2f}" for value in figures.values()))
    Console().print(table)
    summary = {
        "clients": options.clients,
        **pace,
        **measured,
        "overhead": overhead(runs),
    }
    print(json.dumps(summary))
    if options.save:
        print(save("serving", summary, [{"way": way, **run} for way, many in runs.items() for run in many]))


if __name__ == "__main__":
    main()
