"""``SkeletonOfThought`` as a chat model: with tools, and with a content block for each part."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from langchain_core.language_models._compat_bridge import achunks_to_events
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables import Runnable

from sot_chains.aio.blocking import iterate
from sot_chains.answering.record import Part
from sot_chains.answering.streams import AnswerText, Arrivals, read_arrivals
from sot_chains.calls.trace import Call
from sot_chains.calls.usage import NO_TOKENS, num_message_tokens
from sot_chains.filters.reasoning import ReasoningFilter
from sot_chains.outline.words import num_words
from sot_chains.prompts.conversation import Conversation
from sot_chains.providers.langchain import ChainChatModel, LangChainProvider, inner_config
from sot_chains.router.route import Route


async def block_events(
    arrivals: Arrivals, message_id: str, separator: str, named: Callable[[AIMessage], AIMessage]
) -> AsyncGenerator[Any, None]:
    """The events of LangChain's protocol, a content block for each part; ``named`` finishes the message."""
    yield {"event": "message-start", "role": "ai", "id": message_id}
    blocks: dict[Part, tuple[int, AnswerText]] = {}
    texts: dict[Part, str] = {}  # of the blocks that have not ended

    def finish(part: Part) -> dict[str, Any]:
        content = {"type": "text", "text": texts.pop(part)}
        return {"event": "content-block-finish", "index": blocks[part][0], "content": content}

    async with aclosing(arrivals):
        async for arrival in arrivals:
            if isinstance(arrival, AIMessage):
                for part in list(texts):
                    yield finish(part)
                usage = {"usage": arrival.usage_metadata} if arrival.usage_metadata else {}
                yield {"event": "message-finish", **usage, "metadata": named(arrival).response_metadata}
                return
            part, text = arrival
            if part not in blocks:
                num_before = part.point.number - 1 if part.point else 0
                blocks[part], texts[part] = (len(blocks), AnswerText(separator, num_before, bool(blocks))), ""
                content = {"type": "text", "text": ""}
                yield {"event": "content-block-start", "index": blocks[part][0], "content": content}
            index, writer = blocks[part]
            # A heading comes with the text, because a part may be left out; a failed one has it alone.
            is_shown = text or (text is None and part.status != "omitted")
            if added := writer.add(part.point, text or "") if is_shown else "":
                texts[part] += added
                delta = {"type": "text-delta", "text": added}
                yield {"event": "content-block-delta", "index": index, "delta": delta}
            if text is None:
                yield finish(part)


class SkeletonChatModel(ChainChatModel):
    """``SkeletonOfThought`` as a ``BaseChatModel``.

    If it has tools and the question suits points, the model is asked with its tools first. A tool call, or
    whatever else is no text, is passed on as it comes, and so is an answer that ends soon. Once the model has
    written more than ``words_before_calls``, it answers: the answer is written by points instead. The trace
    counts what is dropped. Structured output is the inner model's.

    Attributes:
        asked: The model with its tools, if there are any.
        words_before_calls: How many words the model may write before it calls a tool.
        route: The route of the question, if it is known.
    """

    asked: Runnable[Any, Any] | None = None
    words_before_calls: int = 30
    route: Route | None = None

    @property
    def _inner(self) -> Any:
        provider = self.chain.provider
        if isinstance(provider, LangChainProvider) and provider.takes_stop:
            return provider.runnable
        # As LangChain's own models that take no tools; a function has no `bind_tools`.
        raise NotImplementedError(f"tools and structured output need a chat model, got {provider.model_name}")

    def bind_tools(
        self, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | Any], **kwargs: Any
    ) -> SkeletonChatModel:
        """This model with tools, which the inner model may call."""
        return self.model_copy(update={"asked": self._inner.bind_tools(tools, **kwargs)})

    def with_structured_output(self, schema: Any, **kwargs: Any) -> Runnable[Any, Any]:
        """The inner model's: what has a schema is written in one piece."""
        return cast("Runnable[Any, Any]", self._inner.with_structured_output(schema, **kwargs))

    async def takes_points(self, messages: Sequence[BaseMessage]) -> bool:
        """Whether the last message asks something whose answer is to be written by points."""
        conversation, router = Conversation.of(messages, needs_question=False), self.chain.options.router
        if router == "never" or not conversation.ends_with_question:
            return False
        if isinstance(router, Runnable) and self.route is None:
            self.route = await router.ainvoke(list(messages), inner_config(None))
        return self.route is None or self.route.use_sot

    async def _own_reply(
        self, messages: list[BaseMessage], stop: list[str] | None, arguments: dict[str, Any]
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """What the model with tools writes; nothing if points are to be written, with ``arguments``."""
        if self.asked is None:
            arguments["route"] = self.route
            return
        is_held, text, held, reasoning = await self.takes_points(messages), "", [], ReasoningFilter()
        asked = LangChainProvider(self.asked)
        given = {**asked.bound, **arguments, **({"stop": stop} if stop else {})}
        model: Any = asked.models[0]
        # It has no run of its own: that of this model shows its reply, and its tokens would count twice.
        async with aclosing(model.astream(messages, {"callbacks": []}, **given)) as chunks:
            async for chunk in chunks:
                held.append(chunk)
                text += reasoning.feed(str(chunk.text))
                is_held = is_held and {one["type"] for one in chunk.content_blocks} <= {"text", "reasoning"}
                if not is_held:
                    for one in held:
                        yield one
                    held.clear()
                elif num_words(text) > self.words_before_calls:
                    call = Call("tools", "plain", num_requests=1, pieces=[text])
                    call.cut({**NO_TOKENS, "input_tokens": num_message_tokens(messages)})
                    arguments |= {"route": self.route, "asked_before": call}
                    return
        for one in held:
            yield one

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for chunk in self._own_reply(messages, stop, kwargs):
            yield ChatGenerationChunk(message=chunk)
        if "route" in kwargs:
            async for generated in super()._astream(messages, stop, run_manager, **kwargs):
                yield generated

    async def _astream_chat_model_events(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """LangChain's hook for ``version="v3"``: a content block for each point, as it is written."""
        message_id = f"lc_run--{run_manager.run_id}" if run_manager else ""
        own = self._own_reply(messages, stop, kwargs)
        generated = (ChatGenerationChunk(message=chunk) async for chunk in own)
        async for event in achunks_to_events(generated, message_id=message_id):
            yield event
        if "route" not in kwargs:
            return
        kwargs |= {"stop": stop} if stop else {}
        config, chain = inner_config(run_manager), self.chain
        arrivals = read_arrivals(lambda tell: chain.ainvoke(messages, config, arrivals=tell, **kwargs))
        question = Conversation.of(messages, needs_question=False).question
        separator = chain.options.profile.prompts.for_question(question).separator
        async with aclosing(block_events(arrivals, message_id, separator, self._named)) as events:
            async for event in events:
                yield event

    def _stream_chat_model_events(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from iterate(cast("Any", partial(self._astream_chat_model_events, *args, **kwargs)))
