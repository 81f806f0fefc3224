"""Reads one reply: its events, their text and counts, whether it is whole, and where it repeats itself.

The SDKs send the requests, but their streams drop what this needs: OpenAI's does not say whether the reply
ended or the connection did, Anthropic's skips events without a name, and both drop what a server sends in
place of events, which is where it says why. Knows what all wires have in common.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
import math
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any

import anyio
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata, subtract_usage

from sot_chains.outline.words import HAN, ends_sentence
from sot_chains.providers.base import Delta
from sot_chains.providers.errors import ReportedError, find_error

# A "\r" that comes last may be half of a "\r\n".
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DRAIN_SECONDS = 0.1
_NO_REASON = frozenset({"", "null", "none"})


class EventDecoder:
    """Decodes server-sent events, as pairs of name and data, from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self.strays: list[bytes] = []  # lines that belong to no event
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str]]:
        """The events that are whole with ``chunk``; feed two newlines at the end."""
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        for line in lines:
            field, _, value = line.removeprefix(_BYTE_ORDER_MARK).partition(b":")
            if not line and (self._data or self._name):
                yield self._name.decode(), b"\n".join(self._data).decode()
                self._name, self._data = b"", []
            elif field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif field == b"event":
                self._name = value.removeprefix(b" ")
            elif field not in (b"", b"id", b"retry"):
                self.strays.append(line)


class Reply:
    """A reply of ``model``, the name of the model that was asked, while it is read."""

    def __init__(self, model: str) -> None:
        self.model = model
        # By the server's names. They come once, in parts or as running totals, so the largest count holds.
        self.counts: dict[str, int] = {}
        self.is_over = False  # whether the server has said that nothing follows
        self.has_text = self.has_reasoning = False  # beside each other
        self.finish_reason: str | None = None  # as the server reports it
        self.tier: str | None = None  # which the request was served in, by the server's name
        self._taken: UsageMetadata | None = None  # of the usage
        self._goes_on_after_end = False
        # Halves of a surrogate pair that come in two events are one character.
        self._characters = getincrementaldecoder("utf-16-le")("replace")

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been said."""
        return not self.has_text and not self.has_reasoning

    @property
    def is_whole(self) -> bool:
        """Whether the reply has come to its end."""
        if self.is_over and not self.is_empty:
            return True
        return self.finish_reason is not None and not self._goes_on_after_end

    def add(
        self,
        text: str = "",
        reasoning: str = "",
        *,
        model: object = None,
        finish_reason: object = None,
        counts: Iterable[object] = (),
        tier: object = None,
        is_over: bool = False,
    ) -> Delta:
        """Takes in what an event says, each value as the server sent it; returns its text and reasoning."""
        text = self._characters.decode(text.encode("utf-16-le", "surrogatepass"))
        self._goes_on_after_end |= self.finish_reason is not None and bool(text.strip())
        self.has_text |= bool(text.strip())
        self.has_reasoning |= bool(reasoning)
        self.is_over |= is_over
        for reported in counts:
            self._count(reported)
        if isinstance(model, str) and model:
            self.model = model
        if isinstance(tier, str):
            self.tier = tier
        if finish_reason and str(finish_reason).strip().lower() not in _NO_REASON:
            self.finish_reason = str(finish_reason)
        return Delta(text, reasoning=reasoning)

    @property
    def usage(self) -> UsageMetadata | None:
        """The tokens in LangChain's format, whose input tokens include cache reads and cache writes."""
        counts = self.counts
        read, written = (counts.get(f"cache_{name}_input_tokens", 0) for name in ("read", "creation"))
        num_in = counts.get("prompt_tokens") or counts.get("input_tokens", 0) + read + written
        num_out = counts.get("completion_tokens") or counts.get("output_tokens", 0)
        if not num_in and not num_out:
            return None
        total = max(counts.get("total_tokens", 0), num_in + num_out)
        usage = UsageMetadata(input_tokens=num_in, output_tokens=num_out, total_tokens=total)
        read, written = counts.get("cached_tokens", read), counts.get("cache_write_tokens", written)
        if read or written or "cached_tokens" in counts:
            usage["input_token_details"] = InputTokenDetails(cache_read=read)
            if written:
                num_1h = counts.get("ephemeral_1h_input_tokens", 0)
                details: Any = usage["input_token_details"]  # with names of LangChain's own models
                details |= {"cache_creation": written - num_1h, "ephemeral_1h_input_tokens": num_1h}
        if "reasoning_tokens" in counts:
            usage["output_token_details"] = OutputTokenDetails(reasoning=counts["reasoning_tokens"])
        return usage

    def take_usage(self) -> UsageMetadata | None:
        """The tokens that have been reported since the last time."""
        usage, taken = self.usage, self._taken
        self._taken = usage
        return subtract_usage(usage, taken) if usage and taken else usage

    def end(self) -> str:
        """What is left of a character whose second half did not come."""
        return self._characters.decode(b"", final=True)

    def _count(self, reported: object) -> None:
        for name, value in mapping(reported).items():
            if isinstance(value, Mapping):
                self._count(value)
            elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                self.counts[name] = max(int(value), self.counts.get(name, 0))


async def read(
    chunks: AsyncGenerator[bytes, None], reply: Reply, parse: Callable[[Mapping[str, Any], Reply], Delta]
) -> AsyncGenerator[Delta, None]:
    """Reads the body of a response into ``reply`` and yields its text as it arrives."""
    decoder = EventDecoder()
    async with aclosing(chunks), aclosing(_with_blank_line(chunks)) as lines:
        async for chunk in lines:
            for name, data in decoder.feed(chunk):
                if data.startswith("[DONE]"):
                    reply.is_over = True
                elif data and name != "ping" and not reply.is_over:
                    yield parse(_load(name, data), reply)
            if reply.is_over:
                break
        if reply.is_over:  # so that the connection can be used again; the reply is whole without it
            with anyio.move_on_after(_DRAIN_SECONDS), suppress(Exception):
                async for _ in lines:
                    pass
    body = b"\n".join(decoder.strays).decode(errors="replace").strip()
    if body and not reply.is_whole:  # a server that does not stream, or something else than a reply
        is_empty = reply.is_empty
        payload = json.loads(body) if body.startswith(("{", "[")) else body
        if (error := find_error("", payload)) is not None:
            raise ReportedError(error, is_in_place=is_empty)
        if isinstance(payload, Mapping):
            yield parse(payload, reply)
        if not reply.is_whole:
            raise ReportedError(payload, is_in_place=is_empty)


async def _with_blank_line(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        yield chunk
    yield b"\n\n"


def _load(name: str, data: str) -> Mapping[str, Any]:
    try:
        payload = json.loads(data)
    except ValueError:
        if name != "error":
            raise
        payload = data
    if (error := find_error(name, payload)) is not None:
        raise ReportedError(error)
    return mapping(payload)


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> list[Mapping[str, Any]]:
    """The objects in ``value`` if it is an array, else none."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def find_text(value: object) -> str:
    """``value`` if it is text, or the text of its parts if it is an array of content."""
    if isinstance(value, str):
        return value
    return "".join(find_text(part.get("text")) for part in items(value) if part.get("type", "text") == "text")


_TOKEN = re.compile(rf"\s*(?:[{HAN}]|[^\s{HAN}]{{1,32}})")  # of a word without an end: parts, which may loop
_NOT_COMPARED = " \t\r\n.,;:!?\"'*()"
_NUM_WORDS, _NUM_REPEATS = 8, 3


class LoopGuard:
    """Ends a text that repeats the same eight words a third time, before the repetition it is in.

    While words repeat earlier ones they are held back, and given out once the text goes on otherwise. From
    the second time on whole sentences or lines are given out only, so that the text ends with one. In
    scripts other than Latin, sixteen words or characters count.
    """

    cuts_sentences = True

    def __init__(self) -> None:
        self.is_over = False
        self._counts = Counter[tuple[str, ...]]()  # how often each run of words has come
        self._words: list[str] = []
        self._num_repeating = 0  # of the last words: those that repeat earlier ones
        self._held: list[str] = []
        self._num_free: int | None = None  # of the held words: those before the first repetition
        self._rest = ""  # a word that may not be whole

    def feed(self, piece: str) -> str:
        """The text that is sure to stay."""
        return self._read(self._rest + piece, is_last=False)

    def end(self, *, is_cut: bool = False) -> str:
        """The rest, after the last piece."""
        given = self._read(self._rest, is_last=True)
        return given if self.is_over else given + "".join(self._held) + self._rest

    def _read(self, text: str, *, is_last: bool) -> str:
        if self.is_over:
            return ""
        tokens = _TOKEN.findall(text)
        num_read = sum(map(len, tokens))
        if tokens and num_read == len(text) and not is_last and text[-1:].isascii():
            num_read -= len(tokens.pop())  # the last word may go on
        self._rest = text[num_read:]
        for token in tokens:
            self._words.append(token.strip(_NOT_COMPARED).casefold() or token)
            self._held.append(token)
            num_repeats = self._count()
            if num_repeats and self._num_free is None:
                self._num_free = len(self._held) - self._num_repeating
            if num_repeats >= _NUM_REPEATS - 1:
                self.is_over, self._rest = True, ""
                break
        return self._given()

    def _count(self) -> int:
        words = self._words
        word, pair = (words[-1],), tuple(words[-2:])
        if len(pair) == 2 and self._counts[pair]:
            self._num_repeating = max(self._num_repeating, 1) + 1
        else:
            self._num_repeating = int(self._counts[word] > 0)
        num_compared = _NUM_WORDS * (1 if words[-1].isascii() else 2)
        run = tuple(words[-num_compared:]) if len(words) >= num_compared else ()
        num_repeats = self._counts[run] if run else 0
        self._counts.update({word, pair, run} - {()})
        return num_repeats

    def _given(self) -> str:
        held = self._held
        end = len(held) - self._num_repeating
        while self._num_free is not None and end > self._num_free and not self._ends_at(end):
            end -= 1
        given, self._held = held[:end], [] if self.is_over else held[end:]
        if self._num_free is not None:
            self._num_free = max(0, self._num_free - end)
        return "".join(given)

    def _ends_at(self, index: int) -> bool:
        is_line = index < len(self._held) and "\n" in self._held[index]
        return is_line or ends_sentence(self._held[index - 1])
