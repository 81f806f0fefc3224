"""What all routes of one server share: the model, by key where clients bring theirs, and its limits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request
from starlette.datastructures import Headers

from sot_chains.serving.metrics import Metrics
from sot_chains.serving.modes import ServedModel
from sot_chains.serving.schema import RefusedError
from sot_chains.serving.stream import Pace, read_body

_MAX_KEYS = 256


@dataclass
class Service:
    """One served model.

    Attributes:
        name: Its name for clients.
        served: The model.
        with_key: Makes the model for a client's key; ``None`` if clients need none of their own.
        api_key: The server's own key, which clients must send.
        max_body_bytes: The longest body of a request.
        pace: The pace of streams.
        in_turn: Whether the page uses one mode after the other.
        metrics: Counts its requests.
    """

    name: str
    served: ServedModel
    with_key: Callable[[str], ServedModel] | None = None
    api_key: str | None = None
    max_body_bytes: int = 8_000_000
    pace: Pace = field(default_factory=Pace)
    in_turn: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    _by_key: OrderedDict[str, ServedModel] = field(default_factory=OrderedDict, repr=False)

    @property
    def models(self) -> dict[str, tuple[str, str]]:
        """By the name that clients ask for: the mode, and its description."""
        return {
            f"{self.name}:{mode}" if mode else self.name: (mode, description)
            for mode, description in self.served.modes.items()
        }

    def mode_of(self, model: str) -> str:
        """The mode that a client asks for.

        Raises:
            RefusedError: There is no such model.
        """
        if model not in self.models:
            raise RefusedError(
                f"the model {model[:200]!r} does not exist; available are {', '.join(self.models)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.models[model][0]

    def served_for(self, request: Request) -> ServedModel:
        """The model, with the client's own key if the server has none.

        Raises:
            RefusedError: The client's key is missing.
        """
        if self.with_key is None:
            return self.served
        key = bearer_key(request.headers)
        if not key:
            raise RefusedError(
                "the API key is missing; this server passes each client's own key on",
                status=401,
                code="invalid_api_key",
            )
        if key not in self._by_key:
            self._by_key[key] = self.with_key(key)
            if len(self._by_key) > _MAX_KEYS:
                self._by_key.popitem(last=False)
        self._by_key.move_to_end(key)
        return self._by_key[key]

    async def body(self, request: Request) -> bytes:
        """The body of ``request``; see :func:`~sot_chains.serving.stream.read_body`."""
        timeout = self.pace.timeout_seconds
        return await read_body(request, max_bytes=self.max_body_bytes, timeout_seconds=timeout)


def bearer_key(headers: Headers) -> str:
    """The key that a request carries; ``""`` if it carries none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
