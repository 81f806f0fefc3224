"""One model call with rate limiting, timing, usage accounting and retries.

Hundreds of calls run at once, so each is one coroutine that reads the provider, without further generators.
Knows requests and replies; what happens to a point that failed is decided by who takes the text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias, cast

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig

from sot_chains.calls.options import AnswerOptions, CallOptions, Dispensable
from sot_chains.calls.prefix_cache import Plan, PrefixCache, Shared
from sot_chains.calls.rate_limits import log_wait
from sot_chains.calls.trace import Call, span
from sot_chains.calls.usage import NO_TOKENS, count_tokens, num_message_tokens
from sot_chains.filters.reasoning import ReasoningFilter
from sot_chains.outline.skeleton import Point
from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.profile import ReplyBounds, Turns
from sot_chains.providers.base import PrefillRefusedError, ProviderError, find_ending, warn_once
from sot_chains.providers.callbacks import nobody_listens
from sot_chains.providers.errors import as_provider_error, broke_off, without_answer
from sot_chains.providers.langchain import LangChainProvider
from sot_chains.providers.vendor import VendorProvider


@dataclass(slots=True)
class Request:
    """What a call asks for."""

    conversation: Conversation
    text: str | None = None  # what stands in place of the question; None for the question itself
    opening: str = ""  # added to ``text`` if the reply cannot be begun for the model
    reply_start: str = ""  # what the reply is begun with for models that continue one
    examples: Sequence[Turns] = ()  # earlier turns that show what is asked for
    point: Point | None = None  # the point that is asked for, if it is one
    shared: Shared | None = None  # what the text shares with those of other requests
    bounds: ReplyBounds = field(default_factory=ReplyBounds)  # besides where the model ends the reply
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the user's own take precedence

    def messages(self, *, prefill: bool, written: str, shows_examples: bool) -> list[BaseMessage]:
        """The messages of one attempt; with ``prefill`` the model continues what is ``written`` by now."""
        start = self.reply_start + written if prefill else ""
        if self.text is None:
            messages = list(self.conversation.messages)
        else:
            text = self.text if prefill else self.text + self.opening
            shown = self.examples if shows_examples else ()
            turns = [begun if prefill else unbegun for begun, unbegun in shown]
            messages = self.conversation.asking(text, examples=turns)
        return [*messages, AIMessage(content=start)] if start else messages


_OTHER_REPLY = """the call broke off and said something else when it was made again; \
the beginning has been read already and cannot be taken back"""


class ReplyReader:
    """Reads the text of one attempt: without reasoning, and without the beginning that was read already."""

    def __init__(self, read: str, *, is_continued: bool, is_open: bool) -> None:
        self.text = read  # of all attempts
        self.has_text = False  # of this attempt
        self.reasoning = ReasoningFilter(is_open=is_open)  # takes it out of the text, and knows what it was
        self._rest = read[len(read.rstrip()) :] if is_continued else read  # blanks may come again

    def feed(self, piece: str | None) -> str:
        """The new text that the next raw piece gives; ``None`` ends the reply."""
        text = self.reasoning.end() if piece is None else self.reasoning.feed(piece)
        if text and (rest := self._rest):
            is_left_out = not rest.strip() and text[:1].strip()  # blanks where it goes on
            num_same = 0 if is_left_out else min(len(rest), len(text))
            if text[:num_same] != rest[:num_same]:
                raise ProviderError(_OTHER_REPLY)
            self._rest = "" if is_left_out else rest[num_same:]
            text = text[num_same:]
        if piece is None and self._rest.strip():
            raise ProviderError(_OTHER_REPLY)
        self.has_text = self.has_text or bool(text.strip())
        self.text += text
        return text


_AT_ONCE = nullcontext()
_MOST_STOPS = 4  # that OpenAI takes
_SAMPLING = {"temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "min_tokens"}

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
        self._known = options.caching.find(provider)
        self._counts_reads = self._known is None or self._known.counts_reads
        self._cache: PrefixCache | None = None
        if self._known and options.caching.mode != "off":
            self._cache = PrefixCache(self._known, options.caching, self._own)
        tiers = {**(provider.tier_fields if isinstance(provider, VendorProvider) else {}), **self._own}
        self._tier = tiers.get("speed") or tiers.get("service_tier")
        self._is_heard = not nobody_listens(call_options.config)

    def now(self) -> float:
        """Seconds since the answer was begun."""
        return time.perf_counter() - self._begin

    async def make(self, call: Call, request: Request, take: Take) -> None:
        """Makes ``call`` and hands its text to ``take``, piece by piece.

        If the text of a failed attempt has been read, the next one continues it or says the same again.
        """
        num_attempts, read = 0, ""
        with span(call.name, self._options.provider.model_name, [call]):
            while True:
                num_attempts += 1
                refused = self._options.expectations.refused
                prefill, shows_examples = self._options.prefills, "examples" not in refused
                plan = self._plan(request, prefill=prefill, written=read, shows_examples=shows_examples)
                is_begun = prefill and bool(request.reply_start or read)
                call.reply_start = request.reply_start if is_begun else None
                reply = ReplyReader(
                    read, is_continued=prefill, is_open=not is_begun and self._options.opens_reasoning
                )
                try:
                    waits = self.is_limited or plan.prefixes
                    async with self._admitted(call, request, plan) if waits else _AT_ONCE:
                        await self._send(call, request, plan, reply, take)
                    return
                except Exception as error:  # whether it is worth another attempt is decided below
                    new = None if call.pieces else _find_refused(error, request, plan)
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

    def _plan(self, request: Request, *, prefill: bool, written: str, shows_examples: bool) -> Plan:
        messages = request.messages(prefill=prefill, written=written, shows_examples=shows_examples)
        if self._cache is None or request.shared is None or "cache" in self._options.expectations.refused:
            return Plan(messages)
        num_examples = 2 * len(request.examples) if shows_examples else 0
        asked = request.conversation.index + num_examples
        return self._cache.plan(messages, request.shared, asked, num_examples)

    async def _send(self, call: Call, request: Request, plan: Plan, reply: ReplyReader, take: Take) -> None:
        call.begin(self.now())
        deltas = self._options.provider.stream(plan.messages, **self._arguments(call, request, plan))
        self._options.expectations.num_calls += 1
        try:
            async for delta in deltas:
                call.note(delta, self.now())
                if self._options.limiter:
                    self._options.limiter.note(delta, call.reserved)
                if plan.prefixes and delta.remaining is None and delta.pause_seconds is None:
                    plan.end(is_readable=True)
                text = reply.feed(delta.text) if delta.text else ""
                if reply.reasoning.has_discarded:
                    reply.reasoning.has_discarded = False
                    if not call.is_read:
                        reply.text = ""
                        take(None)
                if text and take(text):
                    self._count(call, plan)
                    return
            if text := reply.feed(None):
                take(text)
            self._learn(call, reply)
            if call.usage is None:
                self._count(call, plan)
        except BaseException as error:
            self._note_failure(call, plan, error)
            raise
        finally:
            call.end_seconds = self.now()
            self._options.expectations.num_calls -= 1
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()

    def _arguments(self, call: Call, request: Request, plan: Plan) -> dict[str, Any]:
        config, provider = self._call_options.config, self._options.provider
        parameters = {**(plan.fields or {}), **request.parameters, **self._call_options.parameters}
        if self._known and not self._known.sampling:
            for name in _SAMPLING & parameters.keys():
                warn_once(f"{provider.model_name} takes no {name}: it is left out")
                del parameters[name]
        if self._known and isinstance(self._known.fast, str) and self._tier == "fast":
            parameters.setdefault("extra_headers", {"anthropic-beta": self._known.fast})
        call.tier = self._tier
        if self._is_heard:
            config = cast("RunnableConfig", {**config, "run_name": call.name})
        bounds = request.bounds
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
    async def _admitted(self, call: Call, request: Request, plan: Plan) -> AsyncIterator[None]:
        async with plan.turn(), self._call_options.limit or _AT_ONCE:
            if self._limiter is None:
                yield
                return
            expected: tuple[Any, ...] = ()
            if self._limiter.counts_tokens:
                num_read = plan.expected["cached_tokens"] if plan.expected and not self._counts_reads else 0
                num_in = num_message_tokens(plan.messages) - num_read
                expected = num_in, partial(self._expected_output, call, request)
            call.reserved = await self._limiter.admit(
                self._call_options.question_number,
                *expected,
                longest_wait_seconds=self._options.retries.longest_wait_seconds,
            )
            try:
                yield
            finally:
                used = count_tokens(call.usage)
                num_in = used["input_tokens"] - (0 if self._counts_reads else used["cached_tokens"])
                self._limiter.release(call.reserved, (num_in, used["output_tokens"]) if call.usage else None)

    def _expected_output(self, call: Call, request: Request) -> tuple[int, int]:
        parameters = self._call_options.parameters
        most = parameters.get("max_tokens") or parameters.get("max_completion_tokens")
        expected = round(self._options.expectations.tokens[call.stage])
        if request.bounds.max_tokens:
            expected = min(expected, request.bounds.max_tokens)
        return (most, min(most, expected)) if isinstance(most, int) else (expected, expected)

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
        deadline, failure = self._call_options.deadline_seconds, as_provider_error(error)
        if not failure.is_retryable or num_attempts >= self._options.retries.max_attempts:
            return None
        pause = self._options.retries.pause_seconds(num_attempts, failure)
        # A server that says "later" has not failed: that is waited out under every policy.
        if self._options.policy(request.point, error) != "retry" and not failure.was_refused:
            return None
        return None if deadline is not None and self.now() + pause >= deadline else pause

    def _note_failure(self, call: Call, plan: Plan, error: BaseException) -> None:
        failure = as_provider_error(error)
        if call.pieces or call.usage or not (isinstance(error, ProviderError) and error.is_unbilled):
            self._count(call, plan)
        if self._options.limiter and failure.was_refused:
            self._options.limiter.pause(failure.retry_after_seconds or 0.0)

    @staticmethod
    def _count(call: Call, plan: Plan) -> None:
        if call.usage is None or call.finish_reason is None:
            call.cut({**(plan.expected or NO_TOKENS), "input_tokens": num_message_tokens(plan.messages)})


def _find_refused(error: Exception, request: Request, plan: Plan) -> Dispensable | None:
    """What ``request`` was refused for, if it can do without; ``None`` if it failed otherwise."""
    if isinstance(error, PrefillRefusedError):
        return "prefill"
    said = str(error).lower()
    if as_provider_error(error).status not in (400, 422) and type(error).__name__ != "TemplateError":
        return None
    if (plan.prefixes or plan.fields) and "cache" in said:
        return "cache"
    if request.bounds.stop and "stop" in said:
        return "stop"
    is_about_turns = any(word in said for word in ("role", "alternat", "turn", "messages"))
    return "examples" if request.examples and is_about_turns else None
