"""Models and retrievers for tests. They answer by what they are asked, never by the order of arrival."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableLambda
from pydantic import PrivateAttr

from retrieval_copy.citations.words import readings

CLAY = Document(
    "Greenware dries for a week under loose plastic before the first firing. "
    "The kiln may be opened once the cone reads eighty degrees, and never while it glows.",
    id="clay",
    metadata={"source": "https://example.org/clay.html", "title": "Clay"},
)
GLAZE = Document(
    "Stir the glaze until no lumps are left, then dip each pot for three seconds. "
    "The kiln may be opened once the cone reads eighty degrees, says the older manual too.",
    id="glaze",
    metadata={"source": "glaze.md"},
)
QUESTION = "When may the kiln be opened?"


def retriever(*documents: Document) -> RunnableLambda[str, list[Document]]:
    return RunnableLambda(lambda query: list(documents), name="fixed")


def broken_retriever(query: str) -> list[Document]:
    raise ConnectionError("no route to the store")


def quoting_answer(messages: Sequence[BaseMessage]) -> str:
    """Half of every numbered document in the request."""
    asked = next(str(message.text) for message in reversed(messages) if message.type == "human")
    laid_out = re.findall(
        r"^\[\d+\] (.+?)(?=\n\n\[\d+\] |\n\nQuestion: |\Z)", asked, re.DOTALL | re.MULTILINE
    )
    if not laid_out:
        return f"Nothing is known about {asked.split()[-1]}"
    halves = [" ".join(text.split(" ")[len(text.split(" ")) // 2 :]) for text in laid_out]
    return "It is written: " + " And elsewhere: ".join(halves)


class QuotingModel(BaseChatModel):
    """Answers by ``answer(messages)``, word by word; one token a message in, one a word out."""

    answer: Callable[[Sequence[BaseMessage]], str] = quoting_answer
    supports_assistant_prefill: bool = False
    _requests: list[list[BaseMessage]] = PrivateAttr(default_factory=list)
    _parameters: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "quoting"

    @property
    def requests(self) -> list[list[BaseMessage]]:
        return self._requests

    @property
    def parameters(self) -> list[dict[str, Any]]:
        return self._parameters

    def _pieces(self, messages: list[BaseMessage], kwargs: dict[str, Any]) -> Iterator[AIMessageChunk]:
        self._requests.append(messages)
        self._parameters.append(kwargs)
        words = re.findall(r"\S+\s*|\s+", self.answer(messages))
        for word in words:
            yield AIMessageChunk(content=word)
        usage = UsageMetadata(
            input_tokens=len(messages), output_tokens=len(words), total_tokens=len(messages) + len(words)
        )
        yield AIMessageChunk(
            content="",
            usage_metadata=usage,
            response_metadata={"finish_reason": "stop"},
            chunk_position="last",
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        first, *others = self._pieces(messages, kwargs)
        whole = first + others
        message = AIMessage(
            content=whole.content,
            usage_metadata=whole.usage_metadata,
            response_metadata=whole.response_metadata,
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._pieces(messages, kwargs):
            yield ChatGenerationChunk(message=chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in self._pieces(messages, kwargs):
            yield ChatGenerationChunk(message=chunk)


def assert_literal(message: AIMessage, documents: Sequence[Document], min_tokens: int = 8) -> None:
    """Every citation stands where it says, in both texts, with the same words, and is long enough."""
    for citation in message.response_metadata["citations"]:
        text = message.text[citation["start"] : citation["end"]]
        document = documents[citation["document"]]
        assert text == citation["text"]
        cited = document.page_content[citation["document_start"] : citation["document_end"]]
        assert cited == citation["document_text"]
        one, other = readings([text, cited])
        assert one.symbols == other.symbols
        assert document.id == citation["document_id"]
        assert document.metadata == citation["metadata"]
        assert citation["num_tokens"] >= min_tokens
