"""One model call with rate limiting, timing, usage accounting and retries.

A call is a stream of events that its reader pulls: text, and the news that a failed attempt starts over. The
stream ends with the reply and raises what the last attempt failed with. Knows requests and replies; which
point a reply belongs to, and what happens to a point that failed, is decided by the reader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from sot_chains.calls.options import CallOptions, ReplyBounds, SotOptions
from sot_chains.calls.rate_limits import Limiter, log_wait
from sot_chains.calls.reply import Event, ReplyReader, Restarted, TextDelta
from sot_chains.calls.retries import is_retryable, retry_after_seconds_of_error, was_refused
from sot_chains.calls.trace import Call
from sot_chains.calls.usage import NO_TOKENS, num_message_tokens, num_tokens
from sot_chains.outline.skeleton import Point, Skeleton
from sot_chains.providers.base import Delta, PrefillRefusedError, ProviderError, SharedPrefix
from sot_chains.providers.callbacks import nobody_listens
from sot_chains.providers.errors import without_answer
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import VendorProvider

_AT_ONCE = nullcontext()
_MOST_STOPS = 4  # that OpenAI takes


@dataclass(frozen=True, slots=True)
class Request:
    """What a call asks for.

    Attributes:
        messages: Makes the messages, once for each attempt, since what is known of the model may change:
            ``messages(prefill=..., written=...)``, where ``written`` is the part of the reply, besides what
            it is begun with, that the model is to continue.
        point: The point that is asked for; ``None`` for the skeleton and for a plain answer.
        prefix: What the messages share with those of other requests.
        bounds: Where the reply ends, besides where the model ends it; for models that continue a begun reply.
        prefill: Whether the reply may be begun for the model.
        written: What a begun reply has besides what it is begun with.
        parameters: What the model is told besides the parameters of the answer, which go before.
        skeleton: The outline shown with a point.
    """

    messages: Callable[..., list[BaseMessage]]
    point: Point | None = None
    prefix: SharedPrefix | None = None
    bounds: ReplyBounds | None = None
    prefill: bool = True
    written: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    skeleton: Skeleton = field(default_factory=Skeleton)


class Caller:
    """Makes the calls of one answer.

    Args:
        method: How answers are written.
        setting: The circumstances of this answer.
    """

    def __init__(self, method: SotOptions, setting: CallOptions) -> None:
        self._method = method
        self._setting = setting
        self._begin = time.perf_counter()
        self._vendor = method.provider if isinstance(method.provider, VendorProvider) else None

    def now(self) -> float:
        """Seconds since the answer was begun."""
        return time.perf_counter() - self._begin

    async def stream(
        self, call: Call, request: Request, *, is_read: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[Event, None]:
        """Makes ``call`` and yields its text, with further attempts as the failure policy has it.

        If an attempt fails whose text somebody has read, the next one continues it, if the model continues
        replies; otherwise it is expected to say the same again, and only what follows is yielded.

        Args:
            call: Where the call is recorded.
            request: What to ask.
            is_read: Whether anything of the text has been read, so that it cannot be discarded.

        Raises:
            Exception: What the last attempt failed with.
        """
        num_attempts, read_text, may_prefill = 0, "", request.prefill
        while True:
            num_attempts += 1
            prefill = may_prefill and self._method.prefills
            written = request.written + read_text if prefill else ""
            messages = request.messages(prefill=prefill, written=written)
            is_begun = prefill and (call.stage != "plain" or bool(written))
            is_open = not is_begun and self._method.opens_reasoning
            beginning = written[len(written.rstrip()) :] if prefill else read_text
            reply = ReplyReader(beginning if read_text else "", is_open=is_open, is_read=is_read)
            try:
                async with (
                    self._admitted(call, request, messages),
                    self._sent(call, request, messages) as deltas,
                ):
                    async for delta in deltas:
                        self._note(call, delta)
                        for event in reply.feed(delta.text) if delta.text else ():
                            read_text = read_text + event.text if isinstance(event, TextDelta) else ""
                            yield event
                    for event in reply.end():
                        yield event
                    self._note_end(call, reply)
                return
            except PrefillRefusedError:
                if not prefill:
                    raise
                num_attempts -= 1  # it has told us something, and costs nothing
                may_prefill = False
                continue
            except Exception as error:  # whether it is worth another attempt is decided below
                if not call.pieces and self._learns_from(error, call):
                    num_attempts -= 1
                    continue
                pause = self._pause_seconds(error, num_attempts, request)
                if pause is None:
                    raise
                log_wait(pause, f"{call.name} is asked for again after: {error}")
                await asyncio.sleep(pause)
            if not is_read():
                read_text = ""
                yield Restarted()

    def _learns_from(self, error: Exception, call: Call) -> bool:
        """Whether the request was refused for something that can be left out from now on: stops, examples."""
        expectations = self._method.expectations
        said = str(error).lower()
        status = error.status if isinstance(error, ProviderError) else getattr(error, "status_code", None)
        if status not in (400, 422) and type(error).__name__ != "TemplateError":
            return False
        if "stop" in said and not expectations.refuses_stop:
            expectations.refuses_stop = True
        elif any(word in said for word in ("role", "alternat", "turn", "messages")) and not (
            expectations.refuses_examples or call.stage == "plain"
        ):
            expectations.refuses_examples = True
        else:
            return False
        return True

    def _pause_seconds(self, error: Exception, num_attempts: int, request: Request) -> float | None:
        """How long to wait before the next attempt; ``None`` if there is to be none.

        Raises:
            ProviderError: The server asks to wait longer than that.
        """
        retries, deadline = self._method.retries, self._setting.deadline_seconds
        if not is_retryable(error):
            return None
        retries.check_wait(error)
        if num_attempts >= retries.max_attempts:
            return None
        # A server that says "later" has not failed: that is waited out under every policy.
        if self._method.policy(request.point, error) != "retry" and not was_refused(error):
            return None
        pause = retries.pause_seconds(num_attempts, error)
        return None if deadline is not None and self.now() + pause >= deadline else pause

    def _admitted(
        self, call: Call, request: Request, messages: Sequence[BaseMessage]
    ) -> AbstractAsyncContextManager[None]:
        """Waits until the bound on calls in flight and the rate limits admit a call."""
        limiter = self._method.limiter
        if limiter is not None and limiter.is_unlimited:
            limiter = None
        if limiter is None and self._setting.limit is None:
            return _AT_ONCE
        return self._admitted_by(limiter, call, request, messages)

    @asynccontextmanager
    async def _admitted_by(
        self, limiter: Limiter | None, call: Call, request: Request, messages: Sequence[BaseMessage]
    ) -> AsyncIterator[None]:
        async with self._setting.limit or _AT_ONCE:
            permit = None
            if limiter:
                estimate = self._expected_tokens(call, request, messages) if limiter.counts_tokens else 0
                longest = self._method.retries.longest_wait_seconds
                number = self._setting.question_number
                permit = await limiter.admit(number, estimate, longest_wait_seconds=longest)
            try:
                yield
            finally:
                if permit:
                    permit.release(call.usage["total_tokens"] if call.usage else None)

    @asynccontextmanager
    async def _sent(
        self, call: Call, request: Request, messages: Sequence[BaseMessage]
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """Sends the request; records when, and what it cost if it fails. Leaving ends the request."""
        call.begin(self.now())
        call.note_sent()
        aclose: Callable[[], Awaitable[None]] | None = None
        try:
            deltas = self._method.provider.stream(messages, **self._arguments(call, request))
            aclose = getattr(deltas, "aclose", None)
            yield deltas
            if call.usage is not None:
                self._method.expectations.learn(call.stage, call.usage["output_tokens"])
        except BaseException as error:
            try:
                if aclose:
                    await aclose()
            finally:
                self._note_failure(call, messages, error)
            raise
        finally:
            call.end_seconds = self.now()

    def _arguments(self, call: Call, request: Request) -> dict[str, Any]:
        """What the provider is told besides the messages."""
        config = self._setting.config
        parameters = {**request.parameters, **self._setting.parameters}
        if not nobody_listens(config):
            config = cast("RunnableConfig", {**config, "run_name": call.name})
        if request.prefix and self._vendor:
            parameters["prefix"] = request.prefix
        if request.bounds:
            parameters |= self._bounded(request.bounds)
            most = request.bounds.max_tokens
            call.has_our_bound = most is not None and parameters["max_tokens"] == most
        return {"config": config, **parameters}

    def _note(self, call: Call, delta: Delta) -> None:
        if delta.text:
            if call.first_text_seconds is None:
                call.first_text_seconds = self.now()
            call.pieces.append(delta.text)
        if delta.reasoning:
            call.reasoning.append(delta.reasoning)
        if delta.usage or delta.finish_reason or delta.response_metadata:
            call.note(delta)
        if delta.rate_limits and self._method.limiter:
            self._method.limiter.update_from_headers(delta.rate_limits)

    def _note_end(self, call: Call, reply: ReplyReader) -> None:
        """Notes what a whole reply has taught, and refuses one that is nothing but reasoning.

        Raises:
            ProviderError: The tokens went into reasoning.
        """
        if reply.filter.reasoning:
            call.reasoning.append(reply.filter.reasoning)
        if reply.filter.was_open:
            self._method.expectations.opens_reasoning = True
        if not reply.has_text and (call.reasoning or call.is_out_of_tokens):
            written = call.usage["output_tokens"] if call.usage else None
            model, num_tokens = self._method.provider.model_name, call.reasoning_tokens or written
            raise without_answer(model, call.finish_reason, num_tokens)

    def _expected_tokens(self, call: Call, request: Request, messages: Sequence[BaseMessage]) -> int:
        """The tokens that a call is expected to use."""
        parameters = self._setting.parameters
        most = parameters.get("max_tokens") or parameters.get("max_completion_tokens")
        expected = self._method.expectations.output_tokens(call.stage)
        if request.bounds and request.bounds.max_tokens:
            expected = min(expected, request.bounds.max_tokens)
        return num_message_tokens(messages) + (most if isinstance(most, int) else expected)

    def _bounded(self, bounds: ReplyBounds) -> dict[str, Any]:
        """The bounds together with those of the user, be they of this call or of the model."""
        provider, parameters = self._method.provider, self._setting.parameters
        wrapped = provider if isinstance(provider, LangChainProvider) else None

        def own(name: str) -> Any:
            given = parameters.get(name)
            return wrapped.setting(name) if given is None and wrapped else given

        bounded: dict[str, Any] = {}
        takes_stop = (wrapped is None or wrapped.takes_stop) and not self._method.expectations.refuses_stop
        if bounds.stop and takes_stop:
            stop = own("stop") or []
            bounded["stop"] = [*([stop] if isinstance(stop, str) else stop), *bounds.stop][:_MOST_STOPS]
        if bounds.max_tokens is not None:
            most = own("max_tokens")
            if parameters.get("max_tokens") is None:  # a call's bound is the user's
                most = min(most or bounds.max_tokens, bounds.max_tokens)
            bounded["max_tokens"] = most
        return bounded

    def _note_failure(self, call: Call, messages: Sequence[BaseMessage], error: BaseException) -> None:
        """Notes what the failed attempt cost, and tells the limits what the server said."""
        if not call.pieces and isinstance(error, ProviderError) and error.is_unbilled:
            call.attempt = NO_TOKENS
        elif call.usage is None or call.finish_reason is None:
            num_in, num_out = num_message_tokens(messages), num_tokens(call.text) if call.pieces else 0
            call.cut({**NO_TOKENS, "input_tokens": num_in, "output_tokens": num_out})
        if self._method.limiter and was_refused(error):
            said = error.rate_limits if isinstance(error, ProviderError) else None
            after = retry_after_seconds_of_error(error)
            self._method.limiter.update_from_headers(said, retry_after_seconds=after)
