"""When the nodes of a graph start, on a clock that jumps to the next event, so that pauses are exact."""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from sot_chains import Delta, Thought, ThoughtGraph

Edges = Mapping[int, Sequence[int]]


class JumpingSelector(selectors.SelectSelector):
    """Does not wait for a timeout but notes that it has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(timeout if timeout is None else 0)
        if not events and timeout is not None:
            self.now += timeout
        return events


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while it works and jumps while it would wait."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@dataclass
class ClockedProvider:
    """Takes the time that is drawn for each node, and notes when each call began and ended."""

    seconds: Mapping[str, float]
    supports_prefill: bool = False
    model_name: str = "clocked"
    starts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    num_running: int = 0
    most_running: int = 0

    async def stream(
        self, messages: Sequence[BaseMessage], *, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        name = str(messages[-1].text).split("\n")[0]
        clock = asyncio.get_running_loop().time
        assert name not in self.starts
        self.starts[name] = clock()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(self.seconds[name])
        self.num_running -= 1
        self.ends[name] = clock()
        yield Delta("Done.", finish_reason="stop")


def list_schedule(edges: Edges, seconds: Mapping[int, float], num_at_once: int) -> float:
    """The time of the schedule that gives each free place to the node that has been ready for longest."""
    ready = [(0.0, node) for node, needs in edges.items() if not needs]
    heapq.heapify(ready)
    missing = {node: set(needs) for node, needs in edges.items()}
    running: list[tuple[float, int]] = []
    now = 0.0
    while ready or running:
        while ready and len(running) < num_at_once:
            _, node = heapq.heappop(ready)
            heapq.heappush(running, (now + seconds[node], node))
        now, done = heapq.heappop(running)
        for node, needs in missing.items():
            if done in needs:
                needs.remove(done)
                if not needs:
                    heapq.heappush(ready, (now, node))
    return now


def written(edges: Edges, seconds: Mapping[int, float], bound: int | None) -> tuple[ClockedProvider, float]:
    """Writes the graph, and says how long it took on the clock that jumps."""
    provider = ClockedProvider({f"t{node}": value for node, value in seconds.items()})
    thoughts = [
        Thought(name=f"t{node}", prompt=f"t{node}", needs=tuple(f"t{need}" for need in needs))
        for node, needs in edges.items()
    ]
    loop = JumpingLoop()

    async def write() -> float:
        config: Any = {"max_concurrency": bound} if bound else None
        message = await ThoughtGraph(provider, thoughts).ainvoke("How?", config)
        assert message.response_metadata["sot"]["is_complete"]
        return loop.time()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return provider, runner.run(write())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.floats(0.0, 0.4), st.integers(0, 10_000), st.sampled_from([None, 1, 2, 3, 8]))
@example(50, 0.0, 1, None)
@example(50, 0.05, 2, 3)
def test_a_node_starts_when_what_it_needs_is_written(
    num_nodes: int, density: float, seed: int, bound: int | None
) -> None:
    rng = random.Random(seed)
    order = rng.sample(range(num_nodes), num_nodes)  # needs are not always before in reading order
    edges = {
        node: [need for need in order[: order.index(node)] if rng.random() < density]
        for node in range(num_nodes)
    }
    seconds = {node: rng.uniform(0.1, 10) for node in edges}
    provider, total = written(edges, seconds, bound)
    for node, needs in edges.items():
        earliest = max((provider.ends[f"t{need}"] for need in needs), default=0.0)
        start = provider.starts[f"t{node}"]
        assert start >= earliest - 1e-6
        if bound is None:
            assert abs(start - earliest) < 1e-6
    assert provider.most_running <= (bound or num_nodes)
    assert total <= 1.1 * list_schedule(edges, seconds, bound or num_nodes) + 1e-6
