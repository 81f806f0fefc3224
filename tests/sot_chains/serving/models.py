"""Models behind the server in its tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables import Runnable

from tests.sot_chains.fakes import PacedChatModel


class ToolChatModel(PacedChatModel):
    """Calls the first tool it is given, in two pieces."""

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, Any]:
        return self.bind(tools=list(tools), **kwargs)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        if not kwargs.get("tools") or messages[-1].type == "tool":
            async for chunk in super()._astream(messages, stop, run_manager, **kwargs):
                yield chunk
            return
        self._parameters.append(kwargs)
        name = kwargs["tools"][0]["function"]["name"]
        arguments = json.dumps({"city": "Köln"})
        for piece in (
            tool_call_chunk(name=name, args=arguments[:5], id="call_1", index=0),
            tool_call_chunk(args=arguments[5:], index=0),
        ):
            yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[piece]))
        ended = AIMessageChunk(content="", response_metadata={"finish_reason": "tool_calls"})
        yield ChatGenerationChunk(message=ended)
