"""What a vendor's server keeps of an account: its prompt cache, its limits and its bill. Pure.

The rules are those that OpenAI and Anthropic publish as of November 2026. A prefix is cached where a request
marks its end, can be read once the first response to a request that writes it has begun, and expires. Text is
counted as :mod:`sot_chains.calls.usage` estimates it, so that this bill and an estimate of it can be equal.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from sot_chains.calls.usage import num_tokens

_MESSAGE_TOKENS = 4
_MOST_MARKS, _LOOKBACK_BLOCKS = 4, 20
_STEP_TOKENS = 128  # in which automatic caches match
_PER_KEY = 15  # requests a minute that reach the machine of a ``prompt_cache_key``
# Fields that are part of what is cached, besides the text.
_EMPTYING = ("model", "tools", "tool_choice", "thinking", "reasoning_effort", "output_config", "speed")


@dataclass(frozen=True)
class Terms:
    """How a vendor caches and counts.

    Attributes:
        wire: Whose protocol it speaks.
        cache: Whether prefixes are cached at marks, or automatically in steps of 128 tokens.
        least_tokens: The shortest prefix that is cached.
        counts_reads: Whether tokens read from the cache count against the input tokens of a window.
        ttl_seconds: How long an entry can be read after it was last used, by the name of the lifetime.
    """

    wire: Literal["openai", "anthropic"] = "openai"
    cache: Literal["marks", "automatic"] = "automatic"
    least_tokens: int = 1024
    counts_reads: bool = True
    ttl_seconds: Mapping[str, float] = field(
        default_factory=lambda: {"5m": 300.0, "30m": 1800.0, "1h": 3600.0}
    )


OPENAI_EARLIER = Terms()
OPENAI = Terms(cache="marks")
ANTHROPIC = Terms("anthropic", "marks", counts_reads=False)


@dataclass
class Prompt:
    """A request's text as a chain of blocks."""

    blocks: list[tuple[str, int, str | None]]  # text with its role, tokens, lifetime if its end is marked
    key: str  # of the cache it is looked up in
    has_key: bool  # whether the client has named it
    tier: str | None

    @classmethod
    def of(cls, request: Mapping[str, Any], terms: Terms) -> Prompt:
        """Reads a request of either wire.

        Raises:
            ValueError: It has more marks than the vendor takes.
        """
        blocks: list[tuple[str, int, str | None]] = []
        system = request.get("system")
        turns = request.get("messages") or request["input"]  # of OpenAI's Responses
        messages = [*([{"role": "system", "content": system}] if system else ()), *turns]
        options = request.get("prompt_cache_options") or {}
        for message in messages:
            content = message["content"]
            parts: list[dict[str, Any]] = [{"text": content}] if isinstance(content, str) else content
            said, num_counted = "", 0
            for part in parts:
                begin = "" if said else f"\x1e{message['role']}\x1f"
                said += part.get("text", "")
                mark = part.get("cache_control") or part.get("prompt_cache_breakpoint")
                default = "5m" if terms.wire == "anthropic" else options.get("ttl", "30m")
                num = _MESSAGE_TOKENS + num_tokens(said)
                ttl = (mark.get("ttl") or default) if mark else None
                blocks.append((begin + part.get("text", ""), num - num_counted, ttl))
                num_counted = num
        marks = [number for number, block in enumerate(blocks) if block[2]]
        if terms.wire == "anthropic" and len(marks) > _MOST_MARKS:
            raise ValueError(f"A maximum of 4 blocks with cache_control may be provided. Found {len(marks)}.")
        if terms.wire == "openai" and terms.cache == "marks" and options.get("mode") != "explicit":
            blocks[-1] = (*blocks[-1][:2], options.get("ttl", "30m"))
        fields = {name: request[name] for name in _EMPTYING if name in request}
        cache_key = request.get("prompt_cache_key")
        key, tier = (
            repr((sorted(fields.items()), cache_key)),
            request.get("speed") or request.get("service_tier"),
        )
        return cls(blocks, key, cache_key is not None, tier)

    def __post_init__(self) -> None:
        self.ends = list(
            accumulate(text for text, _, _ in self.blocks)
        )  # the text up to the end of each block
        self.sizes = list(accumulate(tokens for _, tokens, _ in self.blocks))
        self.marks = [place for place, block in enumerate(self.blocks) if block[2]][-_MOST_MARKS:]

    @property
    def num_tokens(self) -> int:
        """Input tokens, however they are billed."""
        return self.sizes[-1]

    @property
    def text(self) -> str:
        """All of its text."""
        return self.ends[-1]


@dataclass
class Entry:
    """A cached prefix."""

    tokens: int
    seconds: float
    expires: float
    is_readable: bool = False


@dataclass
class Charge:
    """What one request is billed; input tokens include reads and writes, and writes those for an hour."""

    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    output_tokens: int = 0
    tier: str | None = None
    entries: list[Entry] = field(default_factory=list)  # that it writes

    def begin(self) -> None:
        """The first event of the response is out: what it writes can be read."""
        for entry in self.entries:
            entry.is_readable = True

    def input_cost(self, write: float = 1.25, write_1h: float = 2.0, read: float = 0.1) -> float:
        """Its input in tokens of full price."""
        num_5m = self.cache_write_tokens - self.cache_write_1h_tokens
        plain = self.input_tokens - self.cached_tokens - self.cache_write_tokens
        return plain + num_5m * write + self.cache_write_1h_tokens * write_1h + self.cached_tokens * read


class PromptCache:
    """The cached prefixes of an account."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._entries: dict[tuple[str, str], Entry] = {}
        self._starts: dict[str, deque[float]] = {}

    def num_readable(self, prompt: Prompt, now: float) -> int:
        """How many tokens of ``prompt`` would be read from the cache now."""
        if self.terms.cache == "automatic":
            return self._automatic(prompt, self._machine(prompt), now)
        found = self._found(prompt, self._machine(prompt), now)
        return found.tokens if found else 0

    def charge(self, prompt: Prompt, now: float) -> Charge:
        """What ``prompt`` reads and writes at the moment ``now``."""
        charge = Charge(input_tokens=prompt.num_tokens)
        key = self._machine(prompt)
        if prompt.has_key:
            self._starts.setdefault(prompt.key, deque()).append(now)
        if self.terms.cache == "automatic":
            charge.cached_tokens = self._automatic(prompt, key, now)
            seconds = self.terms.ttl_seconds["5m"]
            entry = self._entries.setdefault((key, prompt.text), Entry(charge.input_tokens, seconds, 0.0))
            entry.expires = now + seconds
            charge.entries.append(entry)
            return charge
        if found := self._found(prompt, key, now):
            charge.cached_tokens, found.expires = found.tokens, now + found.seconds
        written_to = charge.cached_tokens
        for place in prompt.marks:
            if prompt.sizes[place] < self.terms.least_tokens or prompt.sizes[place] <= charge.cached_tokens:
                continue
            ttl = prompt.blocks[place][2] or ""
            known = self._entries.get((key, prompt.ends[place]))
            if known is None or known.expires <= now:
                seconds = self.terms.ttl_seconds[ttl]
                known = self._entries[key, prompt.ends[place]] = Entry(
                    prompt.sizes[place], seconds, now + seconds
                )
            charge.entries.append(known)
            num = prompt.sizes[place] - written_to
            charge.cache_write_tokens += num
            charge.cache_write_1h_tokens += num if ttl == "1h" else 0
            written_to = prompt.sizes[place]
        return charge

    def _machine(self, prompt: Prompt) -> str:
        """The machine a request reaches, which has its own cache: some 15 a minute reach one by a key."""
        return f"{prompt.key} {len(self._starts.get(prompt.key, ())) // _PER_KEY}"

    def _found(self, prompt: Prompt, key: str, now: float) -> Entry | None:
        """The longest prefix that can be read."""
        found: Entry | None = None
        for place in self._places(prompt.marks):
            entry = self._entries.get((key, prompt.ends[place]))
            if (
                entry
                and entry.is_readable
                and entry.expires > now
                and (not found or entry.tokens > found.tokens)
            ):
                found = entry
        return found

    def _places(self, marks: list[int]) -> Iterator[int]:
        """Where a cached prefix may end: at marks and, at Anthropic's, up to twenty blocks before."""
        back = _LOOKBACK_BLOCKS if self.terms.wire == "anthropic" else 1
        for mark in marks:
            yield from range(max(0, mark - back + 1), mark + 1)

    def _automatic(self, prompt: Prompt, key: str, now: float) -> int:
        """Earlier models of OpenAI: any prefix that another request began with; writing it is free."""
        num_cached = 0
        for (other_key, other), entry in self._entries.items():
            if other_key == key and entry.is_readable and entry.expires > now:
                same = prompt.text[: num_same_characters(prompt.text, other)]
                num_same = num_tokens(same) // _STEP_TOKENS * _STEP_TOKENS
                num_cached = max(num_cached, num_same if num_same >= self.terms.least_tokens else 0)
        return num_cached


def num_same_characters(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


@dataclass
class RateLimits:
    """At most so much in any window: requests, all tokens, input, output tokens. ``None`` for no limit."""

    requests: int | None = None
    tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    window_seconds: float = 1.0
    _spent: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)
    _used: Counter[str] = field(default_factory=Counter)

    def spend(self, now: float, **amounts: int) -> None:
        """Counts ``amounts`` from the moment ``now`` on."""
        self._spent.append((now, amounts))
        self._used.update(amounts)

    def remaining(self, now: float) -> dict[str, int]:
        """What is left, by the names of the limits there are."""
        while self._spent and now - self._spent[0][0] >= self.window_seconds:
            self._used.subtract(self._spent.popleft()[1])
        limits = {
            name: getattr(self, name) for name in ("requests", "tokens", "input_tokens", "output_tokens")
        }
        return {name: max(0, limit - self._used[name]) for name, limit in limits.items() if limit is not None}

    def refused(self, now: float, input_tokens: int) -> tuple[str, float] | None:
        """Which limit refuses a request, and in how many seconds it may be sent; ``None`` if none does."""
        wanted = {"requests": 1, "tokens": input_tokens, "input_tokens": input_tokens, "output_tokens": 1}
        left = self.remaining(now)
        for name, number in wanted.items():
            if name in left and left[name] < number:
                missing = number - left[name]
                for moment, amounts in self._spent:
                    missing -= amounts.get(name, 0)
                    if missing <= 0:
                        return name, moment + self.window_seconds - now
                return name, self.window_seconds
        return None

    def headers(self, now: float, wire: str) -> dict[str, str]:
        """The state of the limits as ``wire`` reports it."""
        headers = {}
        for name, left in self.remaining(now).items():
            unit, limit = name.replace("_", "-"), getattr(self, name)
            for field_name, value in (("limit", limit), ("remaining", left)):
                if wire == "anthropic":
                    headers[f"anthropic-ratelimit-{unit}-{field_name}"] = str(value)
                else:
                    headers[f"x-ratelimit-{field_name}-{unit}"] = str(value)
        return headers


def total(charges: Iterable[Charge]) -> dict[str, int]:
    """The sum of ``charges`` by the names of :class:`sot_chains.calls.usage.Tokens`."""
    names = ("input_tokens", "output_tokens", "cached_tokens", "cache_write_tokens", "cache_write_1h_tokens")
    charges = list(charges)
    return {name: sum(getattr(charge, name) for charge in charges) for name in names}
