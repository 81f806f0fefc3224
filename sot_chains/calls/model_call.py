"""One model call, made to last: let through by the limits, timed, counted, made again after a failure.

Knows requests and replies; which point a reply belongs to, and what becomes of one that cannot be had, is
decided by the caller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, cast

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from sot_chains.calls.options import CallOptions, ReplyBounds, SotOptions
from sot_chains.calls.rate_limits import Limiter, Permit
from sot_chains.calls.retries import is_retryable, retry_after_seconds_of_error, was_refused
from sot_chains.calls.trace import Call
from sot_chains.calls.usage import Tokens, num_message_tokens, num_tokens
from sot_chains.providers.base import Delta, PrefillRefusedError, ProviderError, SharedPrefix
from sot_chains.providers.callbacks import nobody_listens
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import VendorProvider, on_sent
from sot_chains.text.skeleton import Point


class Asked(Protocol):
    """What to ask, and for what.

    Attributes:
        points: What the reply is to hold; none for the skeleton and for a plain answer.
        prefix: What the request shares with others.
        bounds: Where the reply ends, besides where the model ends it; of models that continue a begun reply.
        request: Makes the messages, once for each attempt, since what is known of the model may have changed:
            ``request(prefill=..., written=...)``, where ``written`` is what a begun reply is to go on from
            besides what it begins with.
    """

    @property
    def points(self) -> Sequence[Point]: ...  # noqa: D102 - above
    @property
    def prefix(self) -> SharedPrefix | None: ...  # noqa: D102 - above
    @property
    def bounds(self) -> ReplyBounds | None: ...  # noqa: D102 - above
    @property
    def request(self) -> Callable[..., list[BaseMessage]]: ...  # noqa: D102 - above


class Reply(Protocol):
    """Who gets the text."""

    def take(self, text: str) -> None:
        """Takes the next piece."""
        ...

    def start_over(self) -> bool:
        """Forgets what was taken, for another attempt; ``False`` if somebody has read it already."""
        ...


class Caller:
    """Makes the calls of one answer.

    Args:
        method: How answers are written.
        setting: Under what circumstances this one is.
    """

    def __init__(self, method: SotOptions, setting: CallOptions) -> None:
        self._method = method
        self._setting = setting
        self._begin = time.perf_counter()
        self._is_vendor = isinstance(method.provider, VendorProvider)
        self._tells_when_sent = (
            isinstance(method.provider, VendorProvider) and method.provider.tells_when_sent
        )

    def now(self) -> float:
        """Seconds since the answer was begun."""
        return time.perf_counter() - self._begin

    def expected_tokens(self, messages: Sequence[BaseMessage], stage: str, num_points: int = 1) -> Tokens:
        """What a call is expected to take."""
        parameters = self._setting.parameters
        most = parameters.get("max_tokens") or parameters.get("max_completion_tokens")
        expected = self._method.expectations.output_tokens(stage, num_points)
        return Tokens(
            input_tokens=num_message_tokens(messages),
            output_tokens=most if isinstance(most, int) else expected,
            cached_tokens=0,
            cache_write_tokens=0,
        )

    async def make(self, call: Call, asked: Asked, reply: Reply) -> None:
        """Makes ``call`` and hands its text to ``reply``, trying again where that is the policy.

        Where text of a failed attempt has been read, the next one goes on from it if the model continues
        replies; otherwise it is expected to say the same once more, and only what follows is handed on.

        Raises:
            Exception: What the last attempt failed with.
        """
        num_attempts, taken = 0, ""
        while True:
            num_attempts += 1
            prefill = self._method.prefills
            written = taken if prefill else ""
            messages = asked.request(prefill=prefill, written=written)
            repeated = taken[len(written.rstrip()) :]
            try:
                await self._attempt(call, asked, messages, reply, repeated)
                return
            except PrefillRefusedError:
                if not prefill:
                    raise
                num_attempts -= 1  # it has told us something, and costs nothing
                continue
            except Exception as error:  # which errors are worth another attempt, Retries says
                pause = self._pause_seconds(error, num_attempts, asked)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            if reply.start_over():
                taken = ""
            else:
                taken = taken if len(taken) > len(call.text) + len(written) else written.rstrip() + call.text

    def _pause_seconds(self, error: Exception, num_attempts: int, asked: Asked) -> float | None:
        """How long to wait before the next attempt; ``None`` if there is to be none."""
        retries, deadline = self._method.retries, self._setting.deadline_seconds
        if num_attempts >= retries.max_attempts or not is_retryable(error):
            return None
        # A server that says "later" has not failed: that is waited out under every policy.
        point = asked.points[0] if asked.points else None
        if self._method.policy(point, error) != "retry" and not was_refused(error):
            return None
        pause = retries.pause_seconds(num_attempts, error)
        return None if deadline is not None and self.now() + pause >= deadline else pause

    async def _attempt(
        self, call: Call, asked: Asked, messages: Sequence[BaseMessage], reply: Reply, repeated: str
    ) -> None:
        limit, num_points = self._setting.limit, len(asked.points) or 1
        if limit:
            await limit.acquire()
        permit: Permit | None = None
        try:
            if self._method.limiter and not self._method.limiter.is_unlimited:
                permit = await self._admit(self._method.limiter, call, messages, num_points)
            call.begin(self.now())
            token = None
            if self._tells_when_sent:
                token = on_sent.set(call.note_sent)
            else:
                call.note_sent()
            try:
                await self._stream(call, messages, reply, repeated, asked)
            except BaseException as error:
                self._note_failure(call, messages, error)
                raise
            finally:
                call.end_seconds = self.now()
                if token:
                    on_sent.reset(token)
            if call.usage is not None:
                self._method.expectations.learn(call.stage, call.usage["output_tokens"], num_points)
        finally:
            if permit:
                permit.release(_tokens_of(call))
            if limit:
                limit.release()

    async def _admit(
        self, limiter: Limiter, call: Call, messages: Sequence[BaseMessage], num_points: int
    ) -> Permit:
        tokens = 0
        if limiter.counts_tokens:
            expected = self.expected_tokens(messages, call.stage, num_points)
            tokens = expected["input_tokens"] + expected["output_tokens"]
        return await limiter.admit(self._setting.question_number, tokens)

    async def _stream(
        self,
        call: Call,
        messages: Sequence[BaseMessage],
        reply: Reply,
        repeated: str,
        asked: Asked,
    ) -> None:
        config = self._setting.config
        if not nobody_listens(config):
            config = cast("RunnableConfig", {**config, "run_name": call.name})
        parameters = self._setting.parameters
        if asked.prefix and self._is_vendor:
            parameters = {**parameters, "prefix": asked.prefix}
        if asked.bounds and self._method.prefills:
            parameters = {**parameters, **self._bounded(asked.bounds)}
        take = _after(repeated, reply.take) if repeated else reply.take
        stream = self._method.provider.stream(messages, config=config, **parameters)
        try:
            async for delta in stream:
                if text := delta.text:
                    if call.first_text_seconds is None:
                        call.first_text_seconds = self.now()
                    call.pieces.append(text)
                    take(text)
                if delta.usage or delta.finish_reason or delta.response_metadata:
                    call.note(delta)
                if delta.rate_limits and self._method.limiter:
                    self._method.limiter.update_from_headers(delta.rate_limits)
        except BaseException:
            await cast("AsyncGenerator[Delta, None]", stream).aclose()  # ends the request
            raise

    def _bounded(self, bounds: ReplyBounds) -> dict[str, Any]:
        """The bounds together with those of the user, be they of this call or of the model."""

        def own(name: str) -> Any:
            provider, given = self._method.provider, self._setting.parameters.get(name)
            if given is None and isinstance(provider, LangChainProvider):
                return provider.setting(name)
            return given

        stop = own("stop") or []
        max_tokens = own("max_tokens")
        if self._setting.parameters.get("max_tokens") is None:  # a bound of this call is the user's to choose
            max_tokens = min(max_tokens or bounds.max_tokens, bounds.max_tokens)
        return {"stop": [*([stop] if isinstance(stop, str) else stop), bounds.stop], "max_tokens": max_tokens}

    def _note_failure(self, call: Call, messages: Sequence[BaseMessage], error: BaseException) -> None:
        """Notes what the attempt cost all the same, and tells the limits what the server said."""
        if call.pieces or not (isinstance(error, ProviderError) and error.is_unbilled):
            call.cut(
                Tokens(
                    input_tokens=num_message_tokens(messages),
                    output_tokens=num_tokens(call.text) if call.pieces else 0,
                    cached_tokens=0,
                    cache_write_tokens=0,
                )
            )
        if self._method.limiter and was_refused(error):
            said = error.rate_limits if isinstance(error, ProviderError) else None
            after = retry_after_seconds_of_error(error)
            self._method.limiter.update_from_headers(said, retry_after_seconds=after)


def _tokens_of(call: Call) -> int | None:
    """What the call's last attempt took, if that is known."""
    return call.usage["total_tokens"] if call.usage else None


def _after(repeated: str, take: Callable[[str], None]) -> Callable[[str], None]:
    """Hands on what follows ``repeated``.

    Raises (when called):
        ProviderError: The text begins otherwise.
    """
    rest = repeated

    def take_rest(text: str) -> None:
        nonlocal rest
        num_same = min(len(rest), len(text))
        if rest and not rest.strip() and text[:1].strip():
            rest, num_same = "", 0  # blanks before the place to go on from are the model's to repeat or not
        if text[:num_same] != rest[:num_same]:
            raise ProviderError(
                "the call broke off and said something else when it was made again; "
                "the beginning has been read already and cannot be taken back"
            )
        rest = rest[num_same:]
        if text[num_same:]:
            take(text[num_same:])

    return take_rest
