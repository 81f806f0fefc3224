"""Every fault at once: each answer is whole, marked as partial, or one clear error, and nothing is left."""

import asyncio
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from local_backend.models.default_model import default_model_folder
from sot_chains import ProviderError, Retries, SkeletonOfThought, close_clients
from tests.servers import Aimock, aimock, cutter, transformers_serve
from tests.sot_chains.aimock_prompts import WHOLE
from tests.sot_chains.fakes import other_tasks, sot_of
from tests.sot_chains.providers.test_vendors import WIRES, sot_on

# All faults together hit one request in five.
FAULTS = dict.fromkeys(["429", "429-bare", "500", "529", "malformed", "disconnect", "cut", "hang"], 0.2 / 8)
DEADLINE_SECONDS = 5.0


def num_handles() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


async def endings(sots: list[SkeletonOfThought], num_answers: int) -> list[tuple[str, dict[str, Any]]]:
    """``("whole" | "partial" | "error", trace)`` of answers asked for, 50 at once."""
    at_once = asyncio.Semaphore(50)

    async def one(number: int) -> tuple[str, dict[str, Any]]:
        async with at_once:
            sot = sots[number % len(sots)]
            begin = time.monotonic()
            try:
                if number % 2:
                    message = await sot.ainvoke(f"What about {number}?", deadline_seconds=DEADLINE_SECONDS)
                    text, trace = message.text, message.response_metadata["sot"]
                else:
                    chunks = [
                        chunk
                        async for chunk in sot.astream(
                            f"What about {number}?", deadline_seconds=DEADLINE_SECONDS
                        )
                    ]
                    text, trace = "".join(c.text for c in chunks), chunks[-1].response_metadata["sot"]
            except ProviderError as error:
                return str(error) and "error", dict(error.trace or {})
            finally:
                # Hanging is what is ruled out; a machine with other things to do may be late by a little.
                assert time.monotonic() - begin < DEADLINE_SECONDS + 20
            if trace["is_complete"]:
                assert text == WHOLE or trace["route"] == "plain"
                return "whole", trace
            assert trace["failures"]
            assert all(failure["reason"] for failure in trace["failures"])
            return "partial", trace

    return await asyncio.gather(*(one(number) for number in range(num_answers)))


async def survive(server: Aimock, num_answers: int) -> None:
    gc.collect()
    handles = num_handles()
    sots = [
        sot_on(
            wire,
            server,
            retries=Retries(max_attempts=4, first_pause_seconds=0.02, longest_pause_seconds=0.2),
        )
        for wire in WIRES
    ]
    ended = await endings(sots, num_answers)
    kinds = [kind for kind, _ in ended]
    assert len(kinds) == num_answers
    assert set(kinds) <= {"whole", "partial", "error"}
    assert kinds.count("whole") > num_answers / 4, {kind: kinds.count(kind) for kind in set(kinds)}
    assert len(set(kinds)) > 1  # it was chaos indeed
    stats = server.stats()
    # A call that a deadline ends while it connects is an attempt that the server never sees.
    num_unseen = sum(trace["num_requests"] for _, trace in ended) - stats["requests"]
    assert 0 <= num_unseen <= 1 + num_answers / 100
    assert set(stats["faults"]) >= set(FAULTS)
    reported = [trace["cost"]["reported"] for _, trace in ended]
    # The server counts a reply when it begins it: those cut at a deadline are the difference.
    assert sum(tokens["input_tokens"] for tokens in reported) <= stats["input_tokens"]
    await close_clients()
    # Transports are closed by the loop's next rounds, which a busy machine begins late.
    await until(lambda: not other_tasks() and num_handles() <= handles)
    gc.collect()  # what was only forgotten warns now


async def test_chaos() -> None:
    with aimock(faults=FAULTS, seed=11) as server:
        await survive(server, 40)


@pytest.mark.slow
async def test_chaos_of_five_hundred_answers() -> None:
    with aimock(faults=FAULTS, seed=5) as server:
        await survive(server, 500)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for what sets no event here, e.g. for another process to notice."""
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("wire", WIRES)
async def test_leaving_ends_every_request(wire: str) -> None:
    with aimock(latency={"point": 5000}, pointText="word " * 50) as server:
        task = asyncio.create_task(sot_on(wire, server).ainvoke("What now?"))
        await until(lambda: server.stats()["requests"] == 4)
        assert server.num_open() == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not other_tasks()
        await until(lambda: server.num_open() == 0)
        await close_clients()


@pytest.mark.parametrize("wire", WIRES)
async def test_points_are_begun_early_over_http(wire: str) -> None:
    with aimock(latency={"outline": 30, "point": 10}, chunkSize=5) as server:
        plain = (await sot_on(wire, server).ainvoke("What now?")).response_metadata["sot"]
        eager = (await sot_on(wire, server, eager=True).ainvoke("What now?")).response_metadata["sot"]
    assert eager["skeleton"] == plain["skeleton"]
    assert eager["points"][0]["start_seconds"] < eager["skeleton_call"]["end_seconds"]
    assert [point["text"] for point in eager["points"]] == [point["text"] for point in plain["points"]]


@pytest.mark.slow
async def test_a_real_stream_that_is_cut_is_mended(tmp_path: Path) -> None:
    """``transformers serve`` with the default model, behind a cutter."""
    question = "What helps against stress?"
    weights = default_model_folder(torch.float32)
    retries = Retries(max_attempts=8, first_pause_seconds=0.0)
    with transformers_serve(weights, tmp_path, "--dtype", "float32") as url:
        port = int(url.split(":")[2].split("/")[0])
        whole = await sot_of(f"openai:{weights}", base_url=url, max_points=3).ainvoke(question, max_tokens=32)
        # Each has separate clients: a connection that was not cut is reused, and is not cut again.
        with cutter(port, [900, 2500, 400, 1500]) as between, cutter(port, [900] * 4) as streaming:
            sot, streamed = (
                sot_of(
                    f"openai:{weights}",
                    base_url=f"http://127.0.0.1:{one.port}/v1",
                    retries=retries,
                    max_points=3,
                )
                for one in (between, streaming)
            )
            message = await sot.ainvoke(question, max_tokens=32)
            assert message.text == whole.text
            # A point may be cut at the 32 tokens, but not where the connection was.
            traces = [one.response_metadata["sot"] for one in (message, whole)]
            assert traces[0]["failures"] == traces[1]["failures"]
            chunks = [chunk async for chunk in streamed.astream(question, max_tokens=32)]
            assert "".join(chunk.text for chunk in chunks) == whole.text
            assert between.num_cut >= 3
            assert streaming.num_cut >= 2
        await close_clients()
