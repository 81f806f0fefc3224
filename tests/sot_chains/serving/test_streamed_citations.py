"""Citations that a chain streams, each with its chunk, are all there at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.runnables import RunnableGenerator

from sot_chains.serving.answer import Answer


async def test_citations_of_all_chunks_are_annotations() -> None:
    async def write(asked: AsyncIterator[Any]) -> AsyncIterator[AIMessageChunk]:
        async for _ in asked:
            for number, text in enumerate(("One. ", "Two.", "")):
                cited = {"start": number, "end": number + 1, "metadata": {}, "document_text": text}
                places = {"document_id": "a", "document": 0, "document_start": 0, "document_end": 1}
                metadata = {"citations": [{**cited, **places}], **({} if text else {"finish_reason": "stop"})}
                yield AIMessageChunk(text, response_metadata=metadata)

    answer = Answer(RunnableGenerator(write), [HumanMessage("?")], {})
    assert [text async for text, _ in answer.stream()] == ["One. ", "Two."]
    assert [one["url_citation"]["start_index"] for one in answer.annotations] == [0, 1, 2]
