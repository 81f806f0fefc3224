"""What the calls of an answer share, and how a vendor's cache is told: one plan for both vendors.

What all calls share is a block of its own, the same in each, with a mark at its end: the first call writes it
to the cache, the others read it. An entry can be read once the response that writes it has begun, so that
calls which are to read it wait until then.
https://developers.openai.com/api/docs/guides/prompt-caching
https://platform.claude.com/docs/en/build-with-claude/prompt-caching
"""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from itertools import count
from typing import Any, Literal, TypeAlias, get_args

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from sot_chains.calls.usage import NO_TOKENS, Tokens, num_message_tokens
from sot_chains.providers.base import Provider
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import VendorProvider

_WIRES = {"openai-chat": "openai", "anthropic-chat": "anthropic"}  # by the kind of LangChain's models
_KNOWN = tomllib.loads(files("sot_chains.calls").joinpath("known_models.toml").read_text("utf-8"))


@dataclass(frozen=True)
class KnownModel:
    """What is known of a model on a wire, ``openai`` or ``anthropic``; the fields are those of the data."""

    wire: str
    least_tokens: int = 1024
    marks: bool = False
    ttl: tuple[str, ...] = ()
    sampling: bool = True
    prefill: bool = True
    fast: bool | str = False

    @property
    def counts_reads(self) -> bool:
        """Whether tokens read from the cache count against input tokens a minute."""
        return self.wire == "openai"


def find_known(provider: Provider, name: str | None = None) -> KnownModel | None:
    """What is known of the model of ``provider``, or of another name on its wire; ``None`` if nothing is."""
    if isinstance(provider, VendorProvider):
        return _find(provider.vendor, name or provider.model_name)
    models = provider.models if isinstance(provider, LangChainProvider) else ()
    wires = set[str | None]()
    for model in models:
        wires.add(_WIRES.get(model._llm_type) if isinstance(model, BaseChatModel) else None)
    return _find(wires.pop() if len(wires) == 1 else None, name or provider.model_name)


@cache
def _find(wire: str | None, name: str) -> KnownModel | None:
    models = _KNOWN.get(wire or "", {})
    fitting = max(filter(name.startswith, models), key=len, default="")
    if wire is None or not fitting:
        return None
    given = {**models.get("", {}), **models[fitting]}  # what holds for all of a wire, and for this one
    return KnownModel(wire, **{**given, "ttl": tuple(given.get("ttl", ()))})


_MOST_MARKS = 4  # of a request
_WRITE, _READ = 1.25, 0.1  # in tokens of full price
_LEAST_SAVED = 0.02  # of the input of a fan-out, for which the other points wait for the first
_PER_KEY, _KEY_SECONDS = 15, 60.0  # requests that reach one machine by one key
_FAN_OUT = 9  # requests of an answer
Mode = Literal["auto", "shared", "off"]
_End: TypeAlias = tuple[int, int | None]  # of a prefix: a message, and how many characters of it, or all
_key_starts: dict[str, deque[float]] = {}


@dataclass(frozen=True)
class PromptCaching:
    """How a vendor's prompt cache is used.

    Attributes:
        mode: ``"auto"`` marks what all calls share, and the outline where that saves enough for the points to
            wait until the first has begun; ``"shared"`` marks what all calls share; ``"off"`` marks nothing.
        ttl: How long an entry lives: ``"5m"`` or ``"1h"`` (Anthropic), ``"30m"`` or ``"12h"`` (OpenAI from
            gpt-5.6 on). By default the vendor's default.
        model: The vendor's name of the model, where it is deployed under another one.
    """

    mode: Mode = "auto"
    ttl: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {self.mode!r}")

    def find(self, provider: Provider) -> KnownModel | None:
        """What is known of the model of ``provider``."""
        known = find_known(provider, self.model)
        if self.ttl and self.ttl not in (known.ttl if known else ()):
            has = f"has the lifetimes {known.ttl}" if known and known.ttl else "takes no lifetime"
            raise ValueError(f"the cache of {provider.model_name!r} {has}, got ttl={self.ttl!r}")
        return known


@dataclass(slots=True, frozen=True)
class Shared:
    """How many characters of its text a request shares with all calls, and with all points if it is one."""

    by_all: int
    by_points: int = 0
    num_points: int = 0


@dataclass(slots=True)
class _Prefix:
    tokens: int
    is_readable: bool = False
    writing: asyncio.Event | None = None  # set once it can be read, or its writer has failed

    async def wait(self) -> bool:
        """Waits until it can be read; ``True`` if nobody writes it, so that the caller does."""
        while not self.is_readable and self.writing:
            await self.writing.wait()
        self.writing = None if self.is_readable else asyncio.Event()
        return not self.is_readable

    def end(self, *, is_readable: bool) -> None:
        self.is_readable = self.is_readable or is_readable
        if self.writing:
            self.writing.set()
        self.writing = None


@dataclass(slots=True)
class Plan:
    """What one attempt sends, and which prefixes it shares, the shortest first."""

    messages: Sequence[BaseMessage]
    fields: Mapping[str, Any] | None = None
    prefixes: Sequence[_Prefix] = ()
    marks_for: str | None = None  # the lifetime of its marks; None if it has none
    expected: Tokens | None = None  # to be read and written, once it is its turn
    _written: tuple[_Prefix, ...] = ()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until what others write can be read; they wait for what the block begins to write."""
        try:
            for prefix in self.prefixes:
                if await prefix.wait():
                    self._written += (prefix,)
            if self.marks_for:
                read = max((prefix.tokens for prefix in self.prefixes if prefix.is_readable), default=0)
                written = self.prefixes[-1].tokens - read
                self.expected = {**NO_TOKENS, "cached_tokens": read, "cache_write_tokens": written}
                self.expected["cache_write_1h_tokens"] = written if self.marks_for == "1h" else 0
            yield
        finally:
            self.end(is_readable=False)

    def end(self, *, is_readable: bool) -> None:
        """The response has begun, or has failed to: others need not wait for it any longer."""
        for prefix in self._written:
            prefix.end(is_readable=is_readable)
        self._written = ()


class PrefixCache:
    """The prefixes that the calls of one answer share; fields among the user's ``parameters`` stay."""

    def __init__(self, known: KnownModel, caching: PromptCaching, parameters: Mapping[str, Any]) -> None:
        self._known, self._caching, self._parameters = known, caching, parameters
        self._prefixes: dict[_End, _Prefix] = {}
        self._key: str | None = None

    def plan(self, messages: Sequence[BaseMessage], shared: Shared, asked: int, num_examples: int) -> Plan:
        """The plan of a request, whose message number ``asked`` has the text of which parts are ``shared``.

        Other requests do not have the ``num_examples`` messages behind the system messages.
        """
        known, before = self._known, asked
        if num_examples:  # of what stands before, all requests have the system messages alone
            before = next(number for number, message in enumerate(messages) if message.type != "system")
        ends: list[_End] = [(before - 1, None)] if before and _ends_with_text(messages[before - 1]) else []
        ends += [(asked, shared.by_all)] if shared.by_all and not num_examples else []
        sizes = {end: self._size(messages, end) for end in ends}
        sizes = {end: size for end, size in sizes.items() if size >= known.least_tokens}
        if shared.num_points > 1 and known.marks and self._caching.mode == "auto":
            read, size = max(sizes.values(), default=0), self._size(messages, (asked, shared.by_points))
            if size >= known.least_tokens and _pays(read, size - read, shared.num_points):
                sizes[asked, shared.by_points] = size
        prefixes = [self._prefixes.setdefault(end, _Prefix(size)) for end, size in sizes.items()]
        marked = list(messages)
        blocks = [block for one in messages for block in one.content if isinstance(block, dict)]
        num_own = sum("cache_control" in block or "prompt_cache_breakpoint" in block for block in blocks)
        most = _MOST_MARKS - num_own - ("cache_control" in self._parameters)
        for number, num_characters in reversed(list(sizes)[-most:] if known.marks and most > 0 else []):
            marked[number] = _marked(marked[number], num_characters, self._mark)
        marks_for = (self._caching.ttl or known.ttl[0]) if prefixes and known.marks else None
        return Plan(marked, self._fields(messages, before, bool(prefixes)), prefixes, marks_for)

    def _size(self, messages: Sequence[BaseMessage], end: _End) -> int:
        if end in self._prefixes:
            return self._prefixes[end].tokens
        text = HumanMessage(str(messages[end[0]].text)[: end[1]])
        return num_message_tokens([*messages[: end[0]], text])

    @property
    def _mark(self) -> dict[str, Any]:
        ttl = {"ttl": self._caching.ttl} if self._caching.ttl else {}
        if self._known.wire == "anthropic":
            return {"cache_control": {"type": "ephemeral", **ttl}}
        return {"prompt_cache_breakpoint": {"mode": "explicit", **ttl}}

    def _fields(self, messages: Sequence[BaseMessage], before: int, is_shared: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._known.wire != "openai":
            return fields
        if is_shared:
            is_long = num_message_tokens(messages[:before]) >= self._known.least_tokens
            self._key = self._key or _find_key(messages[: before if is_long else before + 1])
            _key_starts.setdefault(self._key, deque(maxlen=_PER_KEY)).append(time.monotonic())
            fields["prompt_cache_key"] = self._key
        if self._known.marks and (is_shared or num_message_tokens(messages) >= self._known.least_tokens):
            # Without it each request would write the whole of its messages, which no other reads.
            fields["prompt_cache_options"] = {"mode": "explicit"}
        return {name: value for name, value in fields.items() if name not in self._parameters}


def _pays(read: int, more: int, num_points: int) -> bool:
    """Whether marking ``more`` tokens that all points share, besides those they ``read``, saves enough."""
    unmarked = read * (_WRITE + _READ * num_points) + more * num_points
    return more * (num_points - _WRITE - _READ * (num_points - 1)) >= _LEAST_SAVED * unmarked


def _find_key(messages: Sequence[BaseMessage]) -> str:
    """The key of an answer whose calls share ``messages``: not one that is used up by now."""
    digest = blake2b(repr([message.content for message in messages]).encode(), digest_size=12).hexdigest()
    since = time.monotonic() - _KEY_SECONDS
    for other in [other for other, starts in _key_starts.items() if starts[-1] < since]:
        del _key_starts[other]
    keys = (f"sot-{digest}-{number}" for number in count())
    return next(
        key for key in keys if sum(s >= since for s in _key_starts.get(key, ())) + _FAN_OUT <= _PER_KEY
    )


def _ends_with_text(message: BaseMessage) -> bool:
    is_call = isinstance(message, AIMessage) and message.tool_calls
    if is_call or message.type not in ("system", "human", "ai"):
        return False
    last: Any = message.content if isinstance(message.content, str) else [*message.content, ""][-2:][0]
    return bool(str(last if isinstance(last, str) else last.get("text") or "").strip())


def _marked(message: BaseMessage, num_characters: int | None, mark: Mapping[str, Any]) -> BaseMessage:
    """``message`` with a mark behind so many characters of its text, or at its end."""
    content: list[Any] = message.content if isinstance(message.content, list) else [message.content]
    blocks = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    place = len(blocks) - 1
    if num_characters is not None:
        place = next(number for number, block in enumerate(blocks) if block["type"] == "text")
    block = blocks[place]
    parts = [{**block, "text": block["text"][:num_characters], **mark}]
    if num_characters is not None:
        parts.append({**block, "text": block["text"][num_characters:]})
    return message.model_copy(update={"content": [*blocks[:place], *parts, *blocks[place + 1 :]]})
