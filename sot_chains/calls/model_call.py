"""One model call with rate limiting, timing, usage accounting and retries.

A call hands its text on as it arrives, and ends with the reply or raises what the last attempt failed with.
Hundreds of calls run at once, so each is one coroutine that reads the provider, without further generators.
Knows requests and replies; which point a reply belongs to, and what happens to a point that failed, is
decided by who takes the text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from operator import itemgetter
from typing import Any, TypeAlias, cast

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from sot_chains.calls.options import AnswerOptions, CallOptions, Dispensable
from sot_chains.calls.rate_limits import log_wait
from sot_chains.calls.reply import ReplyReader
from sot_chains.calls.request import Request
from sot_chains.calls.retries import as_provider_error
from sot_chains.calls.trace import Call
from sot_chains.calls.usage import NO_TOKENS, num_message_tokens, num_tokens
from sot_chains.providers.base import PrefillRefusedError, ProviderError, find_ending
from sot_chains.providers.callbacks import nobody_listens
from sot_chains.providers.errors import broke_off, without_answer
from sot_chains.providers.langchain import LangChainProvider

_AT_ONCE = nullcontext()
_MOST_STOPS = 4  # that OpenAI takes

# Takes the next text of a reply, or ``None`` to discard it because another attempt follows; tells whether it
# has enough, which ends the call.
Take: TypeAlias = Callable[[str | None], bool]


class Caller:
    """Makes the calls of one answer."""

    def __init__(self, options: AnswerOptions, call_options: CallOptions) -> None:
        self._options = options
        self._call_options = call_options
        self._begin = time.perf_counter()
        provider, limiter = options.provider, options.limiter
        own = provider.parameters if isinstance(provider, LangChainProvider) else {}
        # The user's values of parameters: of the model, bound to it, or for this call.
        self._own = dict(filter(itemgetter(1), (*own.items(), *call_options.parameters.items())))
        self._limiter = limiter if limiter and not limiter.is_unlimited else None
        self.is_limited = self._limiter is not None or call_options.limit is not None
        self._is_heard = not nobody_listens(call_options.config)

    def now(self) -> float:
        """Seconds since the answer was begun."""
        return time.perf_counter() - self._begin

    async def make(self, call: Call, request: Request, take: Take) -> None:
        """Makes ``call`` and hands its text to ``take``, piece by piece.

        If an attempt fails whose text has been read, the next one continues it, if the model continues
        replies; otherwise it is expected to say the same again, and only what follows is handed out.

        Raises:
            Exception: What the last attempt failed with.
        """
        num_attempts, read = 0, ""
        while True:
            num_attempts += 1
            refused = self._options.expectations.refused
            prefill, shows_examples = self._options.prefills, "examples" not in refused
            messages = request.messages(prefill=prefill, written=read, shows_examples=shows_examples)
            is_begun = prefill and bool(request.reply_start or read)
            call.reply_start = request.reply_start if is_begun else None
            reply = ReplyReader(
                read, is_continued=prefill, is_open=not is_begun and self._options.opens_reasoning
            )
            try:
                async with self._admitted(call, request, messages) if self.is_limited else _AT_ONCE:
                    await self._send(call, request, messages, reply, take)
                return
            except Exception as error:  # whether it is worth another attempt is decided below
                new = None if call.pieces else _find_refused(error, request)
                if new and new not in refused:  # which another call may have learned meanwhile
                    self._options.expectations.refused |= {new}
                    num_attempts -= 1  # it has told us something, and costs nothing
                    continue
                pause = self._pause_seconds(error, num_attempts, request)
                if pause is None:
                    raise
                log_wait(pause, f"{call.name} is retried after: {error}")
                await asyncio.sleep(pause)
            read = reply.text
            if not call.is_read:
                read = ""
                take(None)

    async def _send(
        self, call: Call, request: Request, messages: Sequence[BaseMessage], reply: ReplyReader, take: Take
    ) -> None:
        """Makes one attempt; records what comes, when, and what it cost."""
        call.begin(self.now())
        deltas = self._options.provider.stream(messages, **self._arguments(call, request))
        try:
            async for delta in deltas:
                call.note(delta, self.now())
                if delta.pause_seconds and self._options.limiter:
                    self._options.limiter.pause(delta.pause_seconds)
                text = reply.feed(delta.text) if delta.text else ""
                if reply.reasoning.has_discarded:
                    reply.reasoning.has_discarded = False
                    if not call.is_read:
                        reply.text = ""
                        take(None)
                if text and take(text):
                    self._count(call, messages)
                    return
            if text := reply.feed(None):
                take(text)
            self._learn(call, reply)
            if call.usage is None:
                self._count(call, messages)
        except BaseException as error:
            self._note_failure(call, messages, error)
            raise
        finally:
            call.end_seconds = self.now()
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()

    def _arguments(self, call: Call, request: Request) -> dict[str, Any]:
        """The arguments of the provider besides the messages."""
        config = self._call_options.config
        parameters = {**request.parameters, **self._call_options.parameters}
        if self._is_heard:
            config = cast("RunnableConfig", {**config, "run_name": call.name})
        if request.prefix:  # for a provider that takes it
            parameters["prefix"] = request.prefix
        bounds = request.bounds
        provider = self._options.provider
        takes_stop = not isinstance(provider, LangChainProvider) or provider.takes_stop
        if bounds.stop and takes_stop and "stop" not in self._options.expectations.refused:
            own = self._own.get("stop") or []
            parameters["stop"] = [*([own] if isinstance(own, str) else own), *bounds.stop][:_MOST_STOPS]
        if bounds.max_tokens is not None:
            most = self._own.get("max_tokens")
            if self._call_options.parameters.get("max_tokens") is None:  # a call's bound is the user's
                most = min(most or bounds.max_tokens, bounds.max_tokens)
            parameters["max_tokens"] = most
            call.has_our_bound = most == bounds.max_tokens
        return {"config": config, **parameters}

    @asynccontextmanager
    async def _admitted(
        self, call: Call, request: Request, messages: Sequence[BaseMessage]
    ) -> AsyncIterator[None]:
        """Waits until the bound on calls in flight and the rate limits admit a call."""
        async with self._call_options.limit or _AT_ONCE:
            if self._limiter is None:
                yield
                return
            spent = await self._limiter.admit(
                self._call_options.question_number,
                self._expected_tokens(call, request, messages) if self._limiter.counts_tokens else 0,
                longest_wait_seconds=self._options.retries.longest_wait_seconds,
            )
            try:
                yield
            finally:
                self._limiter.release(spent, call.usage["total_tokens"] if call.usage else None)

    def _expected_tokens(self, call: Call, request: Request, messages: Sequence[BaseMessage]) -> int:
        parameters = self._call_options.parameters
        most = parameters.get("max_tokens") or parameters.get("max_completion_tokens")
        expected = self._options.expectations.output_tokens(call.stage)
        if request.bounds.max_tokens:
            expected = min(expected, request.bounds.max_tokens)
        return num_message_tokens(messages) + (most if isinstance(most, int) else expected)

    def _learn(self, call: Call, reply: ReplyReader) -> None:
        """Learns from a reply that has ended; raises if all was reasoning or the model says it has failed."""
        if find_ending(call.finish_reason) == "failed":
            raise broke_off(self._options.provider.model_name, f"it ended with {call.finish_reason!r}")
        if call.usage is not None:
            self._options.expectations.learn(call.stage, call.usage["output_tokens"])
        call.reasoning += reply.reasoning.reasoning
        if reply.reasoning.was_open:
            self._options.expectations.opens_reasoning = True
        if not reply.has_text and (call.reasoning or call.is_out_of_tokens):
            written = call.usage["output_tokens"] if call.usage else None
            model, num_written = self._options.provider.model_name, written or call.reasoning_tokens
            raise without_answer(model, call.finish_reason, num_written)

    def _pause_seconds(self, error: Exception, num_attempts: int, request: Request) -> float | None:
        """The wait before the next attempt, unless it is too long; ``None`` if there is to be none."""
        deadline, failure = self._call_options.deadline_seconds, as_provider_error(error)
        if not failure.is_retryable:
            return None
        pause = self._options.retries.pause_seconds(num_attempts, failure)
        if num_attempts >= self._options.retries.max_attempts:
            return None
        # A server that says "later" has not failed: that is waited out under every policy.
        if self._options.policy(request.point, error) != "retry" and not failure.was_refused:
            return None
        return None if deadline is not None and self.now() + pause >= deadline else pause

    def _note_failure(self, call: Call, messages: Sequence[BaseMessage], error: BaseException) -> None:
        """Records what the failed attempt cost, and tells the limits what the server said."""
        failure = as_provider_error(error)
        if call.pieces or not (isinstance(error, ProviderError) and error.is_unbilled):
            self._count(call, messages)
        if self._options.limiter and failure.was_refused:
            self._options.limiter.pause(failure.retry_after_seconds or 0.0)

    @staticmethod
    def _count(call: Call, messages: Sequence[BaseMessage]) -> None:
        """Estimates the tokens of an attempt whose usage did not arrive, or not the whole of it."""
        if call.usage is None or call.finish_reason is None:
            num_in, num_out = num_message_tokens(messages), num_tokens(call.text) if call.pieces else 0
            call.cut({**NO_TOKENS, "input_tokens": num_in, "output_tokens": num_out})


def _find_refused(error: Exception, request: Request) -> Dispensable | None:
    """What ``request`` was refused for, if it can do without; ``None`` if it failed otherwise."""
    if isinstance(error, PrefillRefusedError):
        return "prefill"
    said = str(error).lower()
    if as_provider_error(error).status not in (400, 422) and type(error).__name__ != "TemplateError":
        return None
    if request.bounds.stop and "stop" in said:
        return "stop"
    is_about_turns = any(word in said for word in ("role", "alternat", "turn", "messages"))
    return "examples" if request.examples and is_about_turns else None
