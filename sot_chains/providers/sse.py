"""Server-sent events from the bytes of a response, and what a server sends in their place.

https://html.spec.whatwg.org/multipage/server-sent-events.html. Knows bytes, not what events mean. The SDKs'
own decoders drop what is no event, which is where a server says why it sends none.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass

import anyio

# A "\r" that comes last may be half of a "\r\n".
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DRAIN_SECONDS = 0.1


class BrokenStreamError(ConnectionError):
    """The connection failed in the middle of a response; ``is_timeout`` if nothing came for too long."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}".strip(": "))
        self.is_timeout = "timeout" in type(cause).__name__.lower()


@dataclass(slots=True, frozen=True)
class ServerEvent:
    """One event: its name, ``""`` if it has none, and its data."""

    name: str
    data: str


class EventDecoder:
    """Decodes events from bytes that are cut anywhere.

    Attributes:
        strays: Lines that belong to no event.
    """

    def __init__(self) -> None:
        self.strays: list[bytes] = []
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []
        self._is_first = True

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """The events that are whole with ``chunk``.

        Raises:
            UnicodeDecodeError: An event is not UTF-8.
        """
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        for line in lines:
            yield from self._take(line)

    def end(self) -> Iterator[ServerEvent]:
        """The last event, should the blank line after it be missing."""
        yield from self._take(self._rest.rstrip(b"\r"))
        yield from self._take(b"")

    def _take(self, line: bytes) -> Iterator[ServerEvent]:
        if self._is_first:
            line, self._is_first = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:
            if self._data or self._name:
                yield ServerEvent(self._name.decode(), b"\n".join(self._data).decode())
            self._name, self._data = b"", []
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
            case b"event":
                self._name = value
            case b"" | b"id" | b"retry":
                pass
            case _:
                self.strays.append(line)


class EventStream:
    """The events of a response.

    Args:
        chunks: The bytes of its body.
    """

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._decoder = EventDecoder()

    async def events(self) -> AsyncGenerator[ServerEvent, None]:
        """Yields the events as they arrive.

        Raises:
            BrokenStreamError: The connection failed.
            UnicodeDecodeError: An event is not UTF-8.
        """
        try:
            async for chunk in self._chunks:
                for event in self._decoder.feed(chunk):
                    yield event
        except UnicodeDecodeError:
            raise
        except Exception as error:  # transports raise errors of several libraries here
            raise BrokenStreamError(error) from error
        for event in self._decoder.end():
            yield event

    @property
    def stray_text(self) -> str:
        """What the body holds besides events, such as an error page."""
        return b"\n".join(self._decoder.strays).decode(errors="replace").strip()

    async def drain(self) -> None:
        """Reads what follows the last event that matters, so that the connection can be used again."""
        with anyio.move_on_after(_DRAIN_SECONDS), suppress(Exception):  # the reply is whole without it
            async for _ in self._chunks:
                pass
