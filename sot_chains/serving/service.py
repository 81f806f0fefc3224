"""What all routes of one server share: the model, by key where clients bring theirs, and its limits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from sot_chains.serving.connection import Pace, body_of, key_of
from sot_chains.serving.metrics import Metrics
from sot_chains.serving.protocol import RefusedError
from sot_chains.serving.ways import ServedModel

_MOST_KEYS = 256


@dataclass
class Service:
    """One served model.

    Attributes:
        name: Its name for clients.
        served: The model.
        of_key: Makes the model for a client's key; ``None`` if clients need not bring any.
        api_key: The key of this server itself.
        max_body_bytes: The longest body of a request.
        pace: Of what is streamed.
        in_turn: Whether the page asks the ways one after the other.
        metrics: Of its requests.
    """

    name: str
    served: ServedModel
    of_key: Callable[[str], ServedModel] | None = None
    api_key: str | None = None
    max_body_bytes: int = 8_000_000
    pace: Pace = field(default_factory=Pace)
    in_turn: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    _by_key: OrderedDict[str, ServedModel] = field(default_factory=OrderedDict, repr=False)

    @property
    def models(self) -> dict[str, tuple[str, str]]:
        """By the name that clients ask for: the suffix of the way, and what it is."""
        return {
            f"{self.name}:{suffix}" if suffix else self.name: (suffix, said)
            for suffix, said in self.served.names.items()
        }

    def suffix_of(self, model: str) -> str:
        """The way that a client asks for.

        Raises:
            RefusedError: There is no such model.
        """
        if model not in self.models:
            raise RefusedError(
                f"there is no model {model[:200]!r} here; there are {', '.join(self.models)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.models[model][0]

    def served_for(self, request: Request) -> ServedModel:
        """The model, with the client's own key if the server has none."""
        if self.of_key is None:
            return self.served
        key = key_of(request.headers)
        if not key:
            raise RefusedError(
                "the API key is missing: this server has none of its own and passes yours on",
                status=401,
                code="invalid_api_key",
            )
        if key not in self._by_key:
            self._by_key[key] = self.of_key(key)
            if len(self._by_key) > _MOST_KEYS:
                self._by_key.popitem(last=False)
        self._by_key.move_to_end(key)
        return self._by_key[key]

    async def body(self, request: Request) -> bytes:
        """The body of ``request``.

        Raises:
            RefusedError: It is too long, or does not come.
        """
        seconds = self.pace.patience_seconds
        try:
            async with asyncio.timeout(seconds):
                return await body_of(request.receive, request.headers, max_bytes=self.max_body_bytes)
        except TimeoutError:
            raise RefusedError(f"the body has not come within {seconds:g} s", status=408) from None
