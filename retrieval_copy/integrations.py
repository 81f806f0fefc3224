"""The chain where LangChain's own parts expect other types: a tool, a graph's node, a retrieval chain.

Knows LangChain's and LangGraph's conventions. Does not know retrieval or citing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, convert_to_messages
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import ensure_config, get_callback_manager_for_config, merge_configs
from langchain_core.runnables.utils import AddableDict
from langchain_core.tools import BaseTool, StructuredTool
from pydantic import BaseModel, Field

from retrieval_copy.chain import RetrievalCopyChain
from retrieval_copy.citations.citations import Citation, document_and_page
from retrieval_copy.with_citations import RetrievalListener
from sot_chains.aio.blocking import BlockingRunnable

_NOSTREAM = "nostream"  # LangGraph does not stream runs with this tag
_ADDED = ("model_provider", "citations", "retrieval")  # what the chain adds to the model's metadata


class _Question(BaseModel):
    question: str = Field(description="A question that can be understood without the conversation.")


def citing_tool(
    chain: Runnable[Any, AIMessage],
    *,
    name: str = "ask_documents",
    description: str = "Answers a question from the documents, with its sources.",
) -> BaseTool:
    """Makes ``chain`` a tool for agents, such as those of ``create_agent``.

    The content of the tool message is the answer, followed by a list of its sources for the agent to name, or
    by a remark if the documents do not support it. Its ``artifact`` is the list of
    :class:`~retrieval_copy.Citation`, for the application; their offsets are also those of the content.

    Args:
        chain: A :class:`~retrieval_copy.RetrievalCopyChain`, possibly wrapped.
        name: The tool's name, for the agent's model.
        description: What the documents are about, for the agent's model.
    """

    def ask(question: str, config: RunnableConfig) -> tuple[str, list[Citation]]:
        return _content_and_artifact(chain.invoke(question, config))

    async def aask(question: str, config: RunnableConfig) -> tuple[str, list[Citation]]:
        return _content_and_artifact(await chain.ainvoke(question, config))

    return StructuredTool.from_function(
        ask,
        aask,
        name=name,
        description=description,
        args_schema=_Question,
        response_format="content_and_artifact",
    )


def _content_and_artifact(answer: AIMessage) -> tuple[str, list[Citation]]:
    citations: list[Citation] = answer.response_metadata.get("citations") or []
    places = dict.fromkeys(map(document_and_page, citations))
    parts = [str(answer.text)]
    if places:
        listed = "\n".join(f"[{number}] {place}" for number, place in enumerate(places, start=1))
        parts.append(f"Sources:\n{listed}")
    if answer.response_metadata.get("retrieval", {}).get("supported") is False:
        parts.append("The documents do not support this answer.")
    return "\n\n".join(parts), citations


def citing_node(chain: Runnable[Any, AIMessage], *, key: str = "messages") -> Runnable[Any, dict[str, Any]]:
    """Makes ``chain`` a node of a LangGraph graph whose state holds messages.

    The node answers the last human message. With ``stream_mode="messages"`` the tokens stream as the model
    writes them, and a last chunk of the same message follows that carries the citations: LangGraph streams
    what models write, so the citations, which the chain adds, would otherwise come with the state alone.

    ``key`` is that of the messages in the state, which the answer is added to.
    """

    def messages(state: Any) -> Any:
        return state[key] if isinstance(state, Mapping) else getattr(state, key)

    def answer(state: Any, config: RunnableConfig) -> dict[str, Any]:
        shown = _Shown()
        message = chain.invoke(messages(state), _listened_to(shown, config))
        shown.announce(message, config)
        return {key: [message]}

    async def aanswer(state: Any, config: RunnableConfig) -> dict[str, Any]:
        shown = _Shown()
        message = await chain.ainvoke(messages(state), _listened_to(shown, config))
        shown.announce(message, config)
        return {key: [message]}

    return RunnableLambda(answer, aanswer, name="citing_node")


def _listened_to(handler: BaseCallbackHandler, config: RunnableConfig | None) -> RunnableConfig:
    return merge_configs(ensure_config(config), RunnableConfig(callbacks=[handler]))


class _Shown(BaseCallbackHandler):
    """Notes the messages of which LangGraph streams the text, and adds a last chunk with the citations."""

    run_inline = True

    def __init__(self) -> None:
        self._ids: set[str | None] = set()

    def on_llm_new_token(
        self, token: Any, *, chunk: Any = None, tags: list[str] | None = None, **kwargs: Any
    ) -> None:
        self._note([chunk], tags)

    def on_llm_end(self, response: LLMResult, *, tags: list[str] | None = None, **kwargs: Any) -> None:
        self._note([generation for batch in response.generations for generation in batch], tags)

    def _note(self, generations: Sequence[Any], tags: list[str] | None) -> None:
        if _NOSTREAM not in (tags or ()):
            self._ids |= {one.message.id for one in generations if isinstance(one, ChatGeneration)}

    def announce(self, message: AIMessage, config: RunnableConfig) -> None:
        """Streams the last chunk of ``message``, unless LangGraph will stream it whole when the node ends."""
        manager = get_callback_manager_for_config(ensure_config(config))
        for handlers in (manager.handlers, manager.inheritable_handlers):  # tracers need no second run
            handlers[:] = [handler for handler in handlers if hasattr(handler, "tap_output_iter")]
        if message.id not in self._ids or not manager.handlers:
            return
        # What the model's own last chunk has already said, such as its usage, would be counted twice.
        added = {
            name: message.response_metadata[name] for name in _ADDED if name in message.response_metadata
        }
        last = AIMessageChunk(content="", id=message.id, response_metadata=added, chunk_position="last")
        (run,) = manager.on_chat_model_start({"name": "citations"}, [[]])
        run.on_llm_new_token("", chunk=ChatGenerationChunk(message=last))
        run.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]))


def retrieval_chain(chain: RetrievalCopyChain) -> Runnable[dict[str, Any], dict[str, Any]]:
    """Gives ``chain`` the names of ``create_retrieval_chain``, so that it can take that one's place.

    Takes a dictionary with ``input``, the question, and, if there are earlier turns, ``chat_history``, their
    messages. Returns it with ``context``, the retrieved documents, ``answer``, the text, and ``message``, the
    whole answer with its citations. When streaming, the input comes first, then ``context``, then the answer
    piece by piece, then ``message``; the sum of all chunks is the result.
    """
    return _RetrievalChain(chain)


class _RetrievalChain(BlockingRunnable[dict[str, Any], dict[str, Any]]):
    def __init__(self, chain: RetrievalCopyChain) -> None:
        self.chain = chain

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        context = RetrievalListener()
        message = await self.chain.ainvoke(_turns(input), context.listening(config), **kwargs)
        return {**input, "context": context.of_chain, "answer": str(message.text), "message": message}

    async def astream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        context, whole = RetrievalListener(), AIMessageChunk(content="")
        chunks = self.chain.astream(_turns(input), context.listening(config), **kwargs)
        is_begun = False
        async with aclosing(chunks):
            async for chunk in chunks:
                if not is_begun:
                    is_begun = True
                    yield AddableDict(input)
                    yield AddableDict(context=context.of_chain)
                whole = whole + chunk
                if text := str(chunk.text):
                    yield AddableDict(answer=text)
        yield AddableDict(message=message_chunk_to_message(whole))


def _turns(given: Mapping[str, Any]) -> list[BaseMessage]:
    question = given["input"]
    asked = question if isinstance(question, BaseMessage) else HumanMessage(question)
    return [*convert_to_messages(given.get("chat_history") or []), asked]
