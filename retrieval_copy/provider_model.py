"""A model named by a string, as a Runnable: what ``sot_chains.providers`` sends, with all ways of calling.

Knows providers and messages. Does not know references.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, convert_to_messages
from langchain_core.messages.utils import message_chunk_to_message
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config

from retrieval_copy import blocking
from sot_chains.providers import Delta, Provider


class ProviderModel(Runnable[LanguageModelInput, AIMessage]):
    """Completions of a provider as messages.

    Args:
        provider: Streams completions.
    """

    def __init__(self, provider: Provider) -> None:
        self.completions = provider

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self.completions.model_name

    @property
    def supports_assistant_prefill(self) -> bool:
        """Whether a final assistant message is continued rather than answered."""
        return self.completions.supports_prefill

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk, None]:
        """Yields the completion as it is written."""
        messages = (
            [HumanMessage(input)]
            if isinstance(input, str)
            else convert_to_messages(input.to_messages() if isinstance(input, PromptValue) else input)
        )
        deltas = self.completions.stream(messages, config=ensure_config(config), **kwargs)
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            async for delta in deltas:
                metadata = dict(delta.response_metadata or {})
                if delta.finish_reason:
                    metadata["finish_reason"] = delta.finish_reason
                yield AIMessageChunk(
                    content=delta.text, usage_metadata=delta.usage, response_metadata=metadata
                )

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """The whole completion."""
        whole = AIMessageChunk(content="")
        async for chunk in self.astream(input, config, **kwargs):
            whole = whole + chunk
        return cast("AIMessage", message_chunk_to_message(whole))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Yields the completion as it is written."""
        return blocking.iterate(lambda: self.astream(input, config, **kwargs))

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """The whole completion."""
        return blocking.run(lambda: self.ainvoke(input, config, **kwargs))
