"""Many requests: what a server holds on to, and what runs on after it."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import httpx
import pytest

from sot_chains.serving.stream import Pace, Send, packets
from tests.sot_chains.fakes import ANSWER, QUESTION, FakeProvider, PacedChatModel
from tests.sot_chains.serving.running import served

BODY = {"model": "paced:sot", "messages": [{"role": "user", "content": QUESTION}]}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def _ask(url: str, num_requests: int, num_clients: int) -> None:
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        numbers = iter(range(num_requests))

        async def one_client() -> None:
            for number in numbers:
                if number % 2:
                    response = await client.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True})
                    assert response.text.endswith("data: [DONE]\n\n")
                else:
                    response = await client.post(f"{url}/v1/chat/completions", json=BODY)
                    assert response.json()["choices"][0]["message"]["content"] == ANSWER

        await asyncio.gather(*(one_client() for _ in range(num_clients)))


def test_two_hundred_clients_at_once_are_answered() -> None:
    model = PacedChatModel(pause=0.005)
    with served(model) as running:
        asyncio.run(_ask(running.url, 200, 200))
        assert model.num_running == 0
        assert model.most_running > 200  # points of many answers at once
    assert len(model.requests) == 800


@pytest.mark.slow
def test_memory_stays_flat_over_thousands_of_requests() -> None:
    with served(FakeProvider(), name="paced") as running:  # which remembers nothing

        def ask(num_requests: int) -> int:
            asyncio.run(_ask(running.url, num_requests, 50))
            gc.collect()
            return _resident_bytes()

        before = ask(500)
        after = ask(2500)
    assert after - before < 10e6


async def test_more_readers_get_fewer_and_larger_packets() -> None:
    async def sent(pace: Pace) -> list[bytes]:
        async def write(send: Send) -> None:
            for number in range(40):
                send(f"{number} ")
                await asyncio.sleep(0.005)

        return [packet async for packet in packets(write, pace)]

    few, many = await asyncio.gather(sent(Pace()), sent(Pace(num_readers=10_000)))
    text = " ".join(map(str, range(40))).encode() + b" "
    assert b"".join(few) == b"".join(many) == text
    # The first piece at once, and the rest at the end.
    assert many == [b"0 ", text.removeprefix(b"0 ")]
    assert len(few) > len(many)
