"""Converts completions of the engine to LangChain messages."""

from __future__ import annotations

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from local_backend.engine.engine import Engine
from local_backend.integrations.chat_format import answer_metadata
from local_backend.requests.outputs import Completion, Update


def chat_result(completion: Completion, model_name: str, engine: Engine) -> ChatResult:
    """A finished answer."""
    message = AIMessage(
        completion.text,
        usage_metadata=_usage(completion),
        response_metadata=answer_metadata(completion, model_name, engine),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def chat_chunk(update: Update, model_name: str, engine: Engine) -> ChatGenerationChunk:
    """A piece of a streamed answer; the last one carries usage and metadata."""
    if update.completion is None:
        return ChatGenerationChunk(message=AIMessageChunk(content=update.text))
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content=update.text,
            usage_metadata=_usage(update.completion),
            response_metadata=answer_metadata(update.completion, model_name, engine),
            chunk_position="last",
        )
    )


def _usage(completion: Completion) -> UsageMetadata:
    prompt, answer = completion.num_prompt_tokens, len(completion.token_ids)
    return UsageMetadata(input_tokens=prompt, output_tokens=answer, total_tokens=prompt + answer)
