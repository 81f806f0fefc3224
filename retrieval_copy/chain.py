"""``RetrievalCopyChain``: answers from retrieved documents, which the model also copies from.

A Runnable with a chat model's input and output types, so it replaces a chat model anywhere, also inside
``SkeletonOfThought``. The algorithm is in :mod:`retrieval_copy.answering`; this module implements the six
call methods of a Runnable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, nullcontext
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage
from langchain_core.prompt_values import ChatPromptValueConcrete, StringPromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from retrieval_copy.answering import Ask, Method, Request, Steps, text_of
from retrieval_copy.citations.citations import MIN_CITATION_TOKENS
from retrieval_copy.model_adapter import (
    RETRIEVE,
    ProviderModel,
    continues_replies,
    idle_drafter,
    joined,
    max_input_tokens,
    token_counter,
    way_of,
)
from retrieval_copy.prompting import ANSWER_PROMPT, CONDENSE_PROMPT, DOCUMENT_PROMPT
from retrieval_copy.references import (
    EarlierTurns,
    RecentAnswers,
    ReferenceSource,
    RetrievedDocuments,
    Search,
)
from retrieval_copy.steps import StreamedReply, adrive, drive, just, last_chunk
from sot_chains.providers import Provider, provider_of
from sot_chains.providers.tasks import gather_or_cancel

_log = logging.getLogger(__name__)

# LangGraph omits runs with this tag from its "messages" stream: the standalone question is not an answer.
_TAG_NOSTREAM = "nostream"
_MOST_THREADS = 64
_MAX_REFERENCE_CHARACTERS = 4_000_000


class RetrievalCopyChain(Runnable[LanguageModelInput, AIMessage]):
    """Answers a question from retrieved documents, with citations of the spans it shares with them.

    Takes a string, messages or a prompt value; the last human message is the question. If there are earlier
    turns, the model first rewrites the question so that it stands alone. The prompt shows as much of the
    retrieved documents as fits; the full documents are passed to the model as references. References do not
    change the answer.

    ``response_metadata["citations"]`` holds a :class:`~retrieval_copy.Citation` for every span whose words
    stand in a document, and ``content_blocks`` has them as LangChain's standard annotations. When
    streaming, both come with the last chunk.

    If nothing is retrieved, the model gets the conversation unchanged. Keyword arguments of a call
    (``max_tokens``, ``stop``) go to the model; ``retrieve=False`` answers this call without documents, e.g.
    to edit an answer.

    Args:
        retriever: Any LangChain retriever, or another Runnable from a query to documents; ``None`` for a
            conversation without documents.
        model: A LangChain chat model, possibly wrapped, or ``"openai:MODEL"``. ``ChatLocal`` takes
            references (load it with a drafter that copies, such as ``"reference_copy"``); some OpenAI models
            take predicted outputs; other models get no references.
        prompt: Asks for the answer; see :data:`~retrieval_copy.prompting.ANSWER_PROMPT` for its fields.
        document_prompt: Formats one document.
        condense_prompt: Asks for a standalone follow-up question; ``None`` searches with it unchanged.
        query: Maps the question, followed by an assistant prefill if given, to the retrieval query; by
            default unchanged. Use it if requests hold more than the topic to search for.
        references: Sources of text to copy from; by default the retrieved documents, the earlier turns and
            this chain's last answers. ``()`` gives the same answers, only slower.
        min_citation_tokens: Minimum number of words in a citation.
        max_document_tokens: Token budget of documents in the prompt; by default what fits the context.
        max_reference_characters: Total characters of references; the first one is always taken.
        prediction: Whether the model takes OpenAI's ``prediction``; by default only models known to take it.
        **options: For a model given by name: ``base_url``, ``api_key`` and so on.

    Raises:
        TypeError: ``retriever``, ``model`` or a reference source has none of these types. When called: the
            input is not a chat model input.
        ValueError: A number is out of range, or the model's name is not supported. When called: there is
            no question.
        RetrievalError: When called: the retriever failed.

    Example:
        >>> from langchain_core.documents import Document
        >>> from langchain_core.language_models import FakeListChatModel
        >>> from langchain_core.runnables import RunnableLambda
        >>> found = RunnableLambda(lambda query: [Document("The kiln is opened at 80 degrees.", id="k")])
        >>> model = FakeListChatModel(responses=["As noted, the kiln is opened at 80 degrees."])
        >>> chain = RetrievalCopyChain(found, model, min_citation_tokens=4)
        >>> answer = chain.invoke("When may I open the kiln?")
        >>> [(span["text"], span["document_id"]) for span in answer.response_metadata["citations"]]
        [('kiln is opened at 80 degrees.', 'k')]
    """

    def __init__(
        self,
        retriever: Runnable[str, list[Document]] | None,
        model: str | Runnable[Any, Any] | Provider,
        *,
        prompt: BasePromptTemplate[Any] = ANSWER_PROMPT,
        document_prompt: BasePromptTemplate[Any] = DOCUMENT_PROMPT,
        condense_prompt: BasePromptTemplate[Any] | None = CONDENSE_PROMPT,
        query: Callable[[str], str] = str,
        references: Sequence[ReferenceSource] | None = None,
        min_citation_tokens: int = MIN_CITATION_TOKENS,
        max_document_tokens: int | None = None,
        max_reference_characters: int = _MAX_REFERENCE_CHARACTERS,
        prediction: bool | None = None,
        **options: Any,
    ) -> None:
        if retriever is not None and not isinstance(retriever, Runnable):
            raise TypeError(
                f"a retriever is a LangChain retriever or another Runnable, got {type(retriever).__name__}; "
                "for a vector store pass store.as_retriever()"
            )
        if references is None:
            references = (RetrievedDocuments(), EarlierTurns(), RecentAnswers())
        if strangers := [source for source in references if not isinstance(source, ReferenceSource)]:
            raise TypeError(
                "references are sources such as RetrievedDocuments() or SimilarAnswers(store), "
                f"got {strangers!r:.80}"
            )
        for name, value in (
            ("min_citation_tokens", min_citation_tokens),
            ("max_document_tokens", max_document_tokens),
            ("max_reference_characters", max_reference_characters),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.model = model if isinstance(model, Runnable) else ProviderModel(provider_of(model, **options))
        if isinstance(model, Runnable) and options:
            raise TypeError(f"the options {sorted(options)} go with a model named by a string")
        self.method = Method(
            retriever=retriever,
            prompt=prompt,
            document_prompt=document_prompt,
            condense_prompt=condense_prompt,
            query=query,
            sources=tuple(references),
            way=way_of(self.model, prediction),
            count=token_counter(self.model),
            max_document_tokens=max_document_tokens,
            max_input_tokens=max_input_tokens(self.model),
            max_reference_characters=max_reference_characters,
            min_citation_tokens=min_citation_tokens,
        )

        if self.method.way == "references" and references and (idle := idle_drafter(self.model)):
            _log.warning(
                "the model decodes with the drafter %s, which copies nothing: load it with "
                "drafter='reference_copy' or 'combined', or pass references=()",
                idle,
            )

    @property
    def InputType(self) -> Any:  # noqa: N802 - LangChain's name
        """The input type for schemas: that of a chat model."""
        return str | StringPromptValue | ChatPromptValueConcrete | list[AnyMessage]

    @property
    def model_name(self) -> str | None:
        """The model's name, if it has one."""
        name = getattr(self.model, "model_name", None)
        return name if isinstance(name, str) else None

    @property
    def supports_assistant_prefill(self) -> bool:
        """Whether the model continues a final assistant message instead of answering it."""
        return continues_replies(self.model)

    # One answer ----------------------------------------------------------------------------------

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answers ``input``."""

        def write(
            given: LanguageModelInput, run_manager: CallbackManagerForChainRun, config: RunnableConfig
        ) -> AIMessage:
            request = drive(self._steps(given, kwargs), lambda step: self._perform(step, config))
            reply = self.model.invoke(request.messages, config, **joined(request.arguments, kwargs))
            self._remember(request, text_of(reply))
            return self.method.message(request, reply)

        return self._call_with_config(write, input, config)

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answers ``input``."""

        async def write(
            given: LanguageModelInput, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
        ) -> AIMessage:
            request = await adrive(self._steps(given, kwargs), lambda step: self._aperform(step, config))
            reply = await self.model.ainvoke(request.messages, config, **joined(request.arguments, kwargs))
            await self._aremember(request, text_of(reply))
            return self.method.message(request, reply)

        return await self._acall_with_config(write, input, config)

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Streams the answer to ``input``; the last chunk carries citations and metadata."""

        def write(
            inputs: Iterator[LanguageModelInput],
            run_manager: CallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> Iterator[AIMessageChunk]:
            (given,) = inputs
            request = drive(self._steps(given, kwargs), lambda step: self._perform(step, config))
            reply = StreamedReply()
            pieces = self.model.stream(request.messages, config, **joined(request.arguments, kwargs))
            with closing(cast("Generator[Any, None, None]", pieces)):
                for piece in pieces:
                    if text := reply.add(piece):
                        yield AIMessageChunk(content=text, id=reply.id)
            self._remember(request, reply.text)
            yield last_chunk(self.method.message(request, reply.message()))

        run = self._transform_stream_with_config(iter([input]), write, config)
        yield from cast("Iterator[AIMessageChunk]", run)

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """Streams the answer to ``input``; the last chunk carries citations and metadata."""

        async def write(
            inputs: AsyncIterator[LanguageModelInput],
            run_manager: AsyncCallbackManagerForChainRun,
            config: RunnableConfig,
        ) -> AsyncGenerator[AIMessageChunk, None]:
            (given,) = [value async for value in inputs]
            request = await adrive(self._steps(given, kwargs), lambda step: self._aperform(step, config))
            reply = StreamedReply()
            pieces = self.model.astream(request.messages, config, **joined(request.arguments, kwargs))
            async with aclosing(cast("AsyncGenerator[Any, None]", pieces)):
                async for piece in pieces:
                    if text := reply.add(piece):
                        yield AIMessageChunk(content=text, id=reply.id)
            await self._aremember(request, reply.text)
            yield last_chunk(self.method.message(request, reply.message()))

        run = self._atransform_stream_with_config(just(input), write, config)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk, None]", run)) as chunks:
            async for chunk in chunks:
                yield chunk

    # Many answers --------------------------------------------------------------------------------

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers all ``inputs`` concurrently, at most ``max_concurrency`` at a time if given."""
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        if configs[0].get("max_concurrency") is None:  # LangChain's default is only a few threads
            configs[0] = {**configs[0], "max_concurrency": min(len(inputs), _MOST_THREADS)}
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

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
                try:
                    return await self.ainvoke(given, config, **kwargs)
                except Exception as error:  # as in LangChain, any error is the result of its input
                    if return_exceptions:
                        return cast("AIMessage", error)  # as Runnable.abatch declares it
                    raise

        return await gather_or_cancel(map(answer, inputs, configs))

    # Steps ---------------------------------------------------------------------------------------

    def _steps(self, given: LanguageModelInput, kwargs: dict[str, Any]) -> Steps:
        return self.method.prepare(given, retrieve=kwargs.get(RETRIEVE, True))

    def _perform(self, step: Search | Ask, config: RunnableConfig) -> Any:
        if isinstance(step, Search):
            return step.retriever.invoke(step.query, config)
        return self.model.invoke(step.messages, _condensing(config), **step.arguments)

    async def _aperform(self, step: Search | Ask, config: RunnableConfig) -> Any:
        if isinstance(step, Search):
            return await step.retriever.ainvoke(step.query, config)
        return await self.model.ainvoke(step.messages, _condensing(config), **step.arguments)

    def _remember(self, request: Request, text: str) -> None:
        for answers in self.method.remembering():
            with _failure_logged():
                answers.add(request.question, text)

    async def _aremember(self, request: Request, text: str) -> None:
        for answers in self.method.remembering():
            with _failure_logged():
                await answers.aadd(request.question, text)


def _condensing(config: RunnableConfig) -> RunnableConfig:
    tags = [*(config.get("tags") or []), _TAG_NOSTREAM]
    return {**config, "run_name": "condense", "tags": tags}


@contextmanager
def _failure_logged() -> Iterator[None]:
    """Logs a failure to store an answer; the answer is returned all the same."""
    try:
        yield
    except Exception:
        _log.warning("the answer could not be kept for similar questions", exc_info=True)
