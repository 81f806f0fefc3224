"""``RetrievalCopyChain``: answers from retrieved documents, which the model also copies from.

A Runnable with a chat model's input and output types, so it replaces a chat model anywhere, also inside
``SkeletonOfThought``. The algorithm is in :mod:`retrieval_copy.answering`; this module implements the call
methods of a Runnable; synchronous ones run on the background event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from retrieval_copy.answering import Answering
from retrieval_copy.citations.citations import MIN_CITATION_TOKENS
from retrieval_copy.model_adapter import (
    ProviderModel,
    continues_replies,
    find_transport,
    limits,
    max_input_tokens,
    takes_quotes,
    token_counter,
)
from retrieval_copy.options import AnswerOptions, OnUnsupported
from retrieval_copy.prompting import ANSWER_PROMPT, BOUNDS, DOCUMENT_PROMPT
from retrieval_copy.references import EarlierTurns, ReferenceSource, RetrievedDocuments
from sot_chains.aio.blocking import gather_or_cancel
from sot_chains.providers import Provider, make_provider
from sot_chains.providers.langchain import ChatRunnable


class RetrievalCopyChain(ChatRunnable):
    """Answers a question from retrieved documents, with citations of the spans it shares with them.

    Takes what a chat model takes; the last human message is the question, after those that it refers to. The
    prompt shows as much of the retrieved documents as fits; all of their text is passed to the model as
    references, which do not change the answer. Without any, the model gets the conversation unchanged.

    ``response_metadata["citations"]`` holds a :class:`~retrieval_copy.Citation` for every span whose words
    stand in a document, ``content_blocks`` has them as LangChain's standard annotations, and
    ``response_metadata["retrieval"]["supported"]`` says whether the passages in the prompt support the
    answer. In a stream a citation comes once its span has ended, and the rest with the last chunk.

    A local model gets stop strings and at most 256 tokens with the default prompt, unless they are set.
    Keyword arguments of a call go to the model; ``retrieve=False`` answers it without documents.

    Args:
        retriever: Any LangChain retriever, or another Runnable from a query to documents; ``None`` for a
            conversation without documents.
        model: A LangChain chat model, possibly wrapped, or ``"openai:MODEL"``. ``ChatLocal`` takes
            references if its drafter copies, such as ``"reference_copy"``; some OpenAI models take predicted
            outputs; others get no references.
        prompt: Asks for the answer; see :data:`~retrieval_copy.prompting.ANSWER_PROMPT` for its fields.
        document_prompt: Formats one document.
        query: Maps the question, followed by any assistant prefill, to the retrieval query.
        references: Sources of text to copy from; by default the retrieved documents and the earlier turns.
            ``()`` gives the same answers, only slower.
        min_citation_tokens: Minimum number of words in a citation.
        max_document_tokens: Token budget of documents in the prompt; by default what fits the context.
        on_unsupported: ``"mark"`` says in the metadata alone that the passages do not support an answer;
            ``"refuse"`` replaces it by a sentence that says so; a stream then begins once that is excluded.
        quotes: Whether answers are sentences of a passage, word for word, which a local model chooses; by
            default with the default prompt. ``False`` for a local model that keeps to its passages.
        prediction: Whether the model takes OpenAI's ``prediction``; by default only models known to take it.
        **options: For a model given by name: ``base_url``, ``api_key`` and so on.

    Raises:
        TypeError: An argument, or when called the input, has none of these types.
        ValueError: A number is out of range, the model's name is not supported, or there is no question.
        RetrievalError: When called: the retriever failed.
    """

    def __init__(
        self,
        retriever: Runnable[str, list[Document]] | None,
        model: str | Runnable[Any, Any] | Provider,
        *,
        prompt: BasePromptTemplate[Any] = ANSWER_PROMPT,
        document_prompt: BasePromptTemplate[Any] = DOCUMENT_PROMPT,
        query: Callable[[str], str] = str,
        references: Sequence[ReferenceSource] | None = None,
        min_citation_tokens: int = MIN_CITATION_TOKENS,
        max_document_tokens: int | None = None,
        on_unsupported: OnUnsupported = "mark",
        quotes: bool | None = None,
        prediction: bool | None = None,
        **options: Any,
    ) -> None:
        if references is None:
            references = (RetrievedDocuments(), EarlierTurns())
        self.model = model if isinstance(model, Runnable) else ProviderModel(make_provider(model, **options))
        if isinstance(model, Runnable) and options:
            raise TypeError(f"the options {sorted(options)} go with a model named by a string")
        self.options = AnswerOptions(
            retriever=retriever,
            prompt=prompt,
            document_prompt=document_prompt,
            query=query,
            sources=tuple(references),
            transport=find_transport(self.model, prediction),
            limits=limits(self.model, BOUNDS if prompt is ANSWER_PROMPT else {}),
            quotes=takes_quotes(self.model, quotes, has_own_prompt=prompt is not ANSWER_PROMPT),
            count=token_counter(self.model),
            max_document_tokens=max_document_tokens,
            max_input_tokens=max_input_tokens(self.model),
            min_citation_tokens=min_citation_tokens,
            on_unsupported=on_unsupported,
        )

    @property
    def model_name(self) -> str | None:
        """The model's name, if it has one."""
        name = getattr(self.model, "model_name", None)
        return name if isinstance(name, str) else None

    @property
    def supports_assistant_prefill(self) -> bool:
        """Whether the model continues a final assistant message instead of answering it."""
        return continues_replies(self.model)

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answers ``input``."""

        async def write(
            given: LanguageModelInput, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
        ) -> AIMessage:
            return await Answering(self.options, self.model, config, kwargs).answer(given)

        return await self._acall_with_config(write, input, config)

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """Streams the answer to ``input``; the last chunk carries metadata and the last citations."""

        async def only() -> AsyncIterator[LanguageModelInput]:
            yield input

        async def write(
            inputs: AsyncIterator[LanguageModelInput],
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> AsyncGenerator[AIMessageChunk, None]:
            answering = Answering(self.options, self.model, config, kwargs)
            async for given in inputs:
                async with aclosing(answering.stream(given)) as chunks:
                    async for chunk in chunks:
                        yield chunk

        run = self._atransform_stream_with_config(only(), write, config)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", run)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers all ``inputs``; when one fails the others are cancelled, unless ``return_exceptions``."""
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        bound = configs[0].get("max_concurrency")
        limit = asyncio.Semaphore(bound) if bound else nullcontext()

        async def answer(given: LanguageModelInput, config: RunnableConfig) -> AIMessage:
            async with limit:
                return await self.ainvoke(given, config, **kwargs)

        if return_exceptions:
            answers = await asyncio.gather(*map(answer, inputs, configs), return_exceptions=True)
            return cast("list[AIMessage]", answers)
        return await gather_or_cancel(map(answer, inputs, configs))
