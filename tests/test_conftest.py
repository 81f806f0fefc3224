"""The guard against the network is itself tested: a guard that does nothing passes everything."""

import asyncio
import socket

import pytest


def test_a_connection_beyond_this_machine_is_refused() -> None:
    with socket.socket() as outside, pytest.raises(OSError, match="must not reach the network"):
        outside.connect(("192.0.2.1", 80))
    with socket.socket() as outside, pytest.raises(OSError, match="must not reach the network"):
        outside.connect_ex(("192.0.2.1", 80))
    with pytest.raises(OSError, match="must not reach the network"):
        socket.getaddrinfo("example.org", 80)


async def test_asyncio_is_guarded_too() -> None:
    with pytest.raises(OSError, match="must not reach the network"):
        await asyncio.open_connection("192.0.2.1", 80)


def test_loopback_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
