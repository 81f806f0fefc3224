"""The server over a real socket, in a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from sot_chains.serving.app import create_app


class Served:
    """A running server.

    Attributes:
        url: Where it is.
        loop: Its event loop.
    """

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, num_tasks: int) -> None:
        self.url = url
        self.loop = loop
        self._num_tasks = num_tasks

    @property
    def api(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def is_idle(self) -> bool:
        """Whether it has no more tasks than without any request, apart from one that waits for its end."""
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks(self.loop)]
        return len(names) - names.count("_shutdown_watcher") <= self._num_tasks


@contextmanager
def served(model: Any, **options: Any) -> Iterator[Served]:
    """Runs a server on a free port; see :func:`~sot_chains.serving.app.create_app` for the options."""
    app = create_app(model, **options)
    config = uvicorn.Config(
        app, port=0, log_level="error", log_config=None, ws="none", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert within(10, lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", loops[0], len(asyncio.all_tasks(loops[0])))
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def within(seconds: float, is_so: Callable[[], bool]) -> bool:
    """Whether something becomes true in that time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
