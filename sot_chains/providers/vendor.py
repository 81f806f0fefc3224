"""What all providers of a vendor's models have in common.

A request is one HTTP attempt: the SDKs' own retries are off, since every attempt must count against the rate
limits and in the trace. Each completion is reported to the callback handlers, if any, as a chat model run.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, ClassVar, Self

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig
from pydantic import SecretStr

from sot_chains.providers.base import Delta, PrefillRefusedError, ProviderError, SharedPrefix
from sot_chains.providers.callbacks import chat_run, nobody_listens
from sot_chains.providers.errors import status_error

_PREFILL_REFUSED = re.compile(
    r"prefill|must end with a user message|continue_final_message|add_generation_prompt|min_tokens",
    re.IGNORECASE,
)
# Called when a request is sent, by providers that can tell; the caller sets it in the same task.
on_sent: ContextVar[Callable[[], None] | None] = ContextVar("on_sent", default=None)
TINY_PARAMETERS = 400e6  # below that, models need their replies begun for them
_SIZE = re.compile(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?)([mb])(?![a-z0-9])", re.IGNORECASE)
_without_prefill: set[Hashable] = set()  # models that refused it, for the life of the process


class VendorProvider(ABC):
    """Streams completions from a vendor's API.

    Args:
        model: The model's name, as the server knows it.
        base_url: The URL of the server.
        api_key: Kept secret: never logged, traced or shown.
        prefill: Whether the model continues a final assistant message; ``None`` to find out from the API's
            response to the first such request.
    """

    vendor: ClassVar[str]
    vendor_url: ClassVar[str] = ""
    tells_when_sent: bool = False  # whether ``on_sent`` is called for each request

    def __init__(
        self, model: str, *, base_url: str, api_key: str | SecretStr | None, prefill: bool | None
    ) -> None:
        if not model:
            raise ValueError(f'the model has no name; write "{self.vendor}:MODEL"')
        self._model = model
        self._base_url = base_url.rstrip("/")
        self._api_key = SecretStr(api_key) if isinstance(api_key, str) else api_key
        self._prefill = prefill

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model!r}, base_url={self._base_url!r})"

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it holds nothing but settings, by which its client is found

    @property
    def model_name(self) -> str:
        """The model's name, as the server knows it."""
        return self._model

    @property
    def is_elsewhere(self) -> bool:
        """Whether the server is not the vendor's own, so that any model may run there."""
        return self._base_url != self.vendor_url

    @property
    def num_parameters(self) -> float:
        """How many parameters the name tells of, as in ``"SmolLM2-135M-Instruct"``; 0 if it does not.

        The vendor's own models are known by other names.
        """
        found = _SIZE.search(self._model) if self.is_elsewhere else None
        return float(found[1]) * {"m": 1e6, "b": 1e9}[found[2].lower()] if found else 0

    @property
    def supports_prefill(self) -> bool:
        """Whether the model continues a final assistant message, as far as is known."""
        return self._prefill is not False and not self.has_refused_prefill

    @property
    def has_refused_prefill(self) -> bool:
        """Whether the API has refused a prefilled reply for this model."""
        return self._identity in _without_prefill

    @property
    def account(self) -> Hashable:
        """Identifies the account: equal for all providers whose requests count against the same limits."""
        key = self._key()
        digest = blake2b(key.encode(), digest_size=8).hexdigest() if key else None
        return (*self._identity, digest)

    @property
    def _identity(self) -> tuple[str, str, str]:
        return self.vendor, self._base_url, self._model

    def stream(
        self,
        messages: Sequence[BaseMessage],
        *,
        config: RunnableConfig,
        prefix: SharedPrefix | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Sends one request and yields the completion of ``messages`` as it arrives.

        Args:
            messages: The conversation.
            config: Callbacks, tags and name of the run.
            prefix: The part of the last user message that other requests share, to be cached.
            **kwargs: Fields of the request: ``stop``, ``temperature``, ``max_tokens``, ``extra_body``.

        Raises:
            ProviderError: No API key, no connection, or the server returns an error or disconnects.
        """
        if nobody_listens(config):
            return self._deltas(messages, kwargs, prefix)
        return self._announced(messages, config, kwargs, prefix)

    @abstractmethod
    def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any], prefix: SharedPrefix | None
    ) -> AsyncGenerator[Delta, None]:
        """Sends the request and reads the reply."""

    @abstractmethod
    def _key(self) -> str | None:
        """The API key, if there is one."""

    async def _announced(
        self,
        messages: Sequence[BaseMessage],
        config: RunnableConfig,
        parameters: dict[str, Any],
        prefix: SharedPrefix | None,
    ) -> AsyncGenerator[Delta, None]:
        async with (
            chat_run(config, messages, model=self._model, parameters=parameters) as run,
            aclosing(self._deltas(messages, parameters, prefix)) as deltas,
        ):
            pieces: list[str] = []
            usage: UsageMetadata | None = None
            metadata: dict[str, Any] = {"model_name": self._model}
            async for delta in deltas:
                if delta.text:
                    pieces.append(delta.text)
                    if run:
                        await run.wrote(delta.text)
                usage = delta.usage or usage
                metadata |= delta.response_metadata or {}
                if delta.finish_reason:
                    metadata["finish_reason"] = delta.finish_reason
                yield delta
            if run:
                run.message = AIMessage(
                    content="".join(pieces), usage_metadata=usage, response_metadata=metadata
                )

    def _status_error(
        self, status: int, said: str, headers: Mapping[str, str], *, prefilled: bool
    ) -> ProviderError:
        """The error for a reply with an error ``status``. Remembers a refused prefill."""
        if status in (400, 422) and prefilled and _PREFILL_REFUSED.search(said):
            _without_prefill.add(self._identity)
            return PrefillRefusedError(
                f"model {self._model!r} at {self._base_url} does not continue a prefilled reply: {said}",
                status=status,
            )
        return status_error(status, said, server=self._base_url, model=self._model, headers=headers)
