"""The events of a streamed reply on OpenAI's wires, chat and Responses, and on Anthropic's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from benchmarks.vendor_account import Charge


@dataclass
class ReplyStream:
    """The events of one reply."""

    request: dict[str, Any]
    charge: Charge
    wire: str
    writer: asyncio.StreamWriter

    def __post_init__(self) -> None:
        self._said = ""
        if "input" in self.request:
            self.wire = "responses"

    async def begin(self) -> None:
        """Sends the first event."""
        if self.wire == "responses":
            await self._event("response.created", response=self._response("in_progress"))
            item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress"}
            return await self._event(
                "response.output_item.added", output_index=0, item={**item, "content": []}
            )
        if self.wire == "openai":
            return await self._chunk(choices=[_choice({"role": "assistant", "content": ""})])
        message: dict[str, Any] = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "content": [],
            "stop_reason": None,
        }
        message |= {"model": self.request["model"], "stop_sequence": None, "usage": self._usage()}
        await self._event("message_start", message=message)
        await self._event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    async def write(self, token: str) -> None:
        """Sends a token."""
        self._said += token
        if self.wire == "responses":
            place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
            return await self._event("response.output_text.delta", **place, delta=token, logprobs=[])
        if self.wire == "openai":
            return await self._chunk(choices=[_choice({"content": token})])
        await self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": token})

    async def end(self, reason: str) -> None:
        """Sends why the reply has ended, and its usage."""
        if self.wire == "responses":
            status = {"stop": "completed", "length": "incomplete"}[reason]
            await self._event(f"response.{status}", response=self._response(status))
        elif self.wire == "openai":
            await self._chunk(choices=[{**_choice({}), "finish_reason": reason}])
            if (self.request.get("stream_options") or {}).get("include_usage"):
                await self._chunk(choices=[], usage=self._usage())
            await self._send(b"data: [DONE]\n\n")
        else:
            delta = {
                "stop_reason": {"stop": "end_turn", "length": "max_tokens"}[reason],
                "stop_sequence": None,
            }
            await self._event("content_block_stop", index=0)
            await self._event("message_delta", delta=delta, usage=self._usage())
            await self._event("message_stop")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def _response(self, status: str) -> dict[str, Any]:
        text = {"type": "output_text", "text": self._said, "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": [text]}
        is_over = status != "in_progress"
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": self.request["model"],
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item] if is_over else [],
            "usage": self._usage() if is_over else None,
            "service_tier": self.charge.tier or "default",
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def _usage(self) -> dict[str, Any]:
        one = self.charge
        if self.wire == "anthropic":
            num_1h = one.cache_write_1h_tokens
            return {
                "input_tokens": one.input_tokens - one.cached_tokens - one.cache_write_tokens,
                "cache_read_input_tokens": one.cached_tokens,
                "cache_creation_input_tokens": one.cache_write_tokens,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": one.cache_write_tokens - num_1h,
                    "ephemeral_1h_input_tokens": num_1h,
                },
                "output_tokens": one.output_tokens,
                "service_tier": "standard",
                "speed": one.tier or "standard",
            }
        details = {"cached_tokens": one.cached_tokens, "cache_write_tokens": one.cache_write_tokens}
        if self.wire == "responses":
            return {
                "input_tokens": one.input_tokens,
                "input_tokens_details": details,
                "output_tokens": one.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": one.input_tokens + one.output_tokens,
            }
        return {
            "prompt_tokens": one.input_tokens,
            "completion_tokens": one.output_tokens,
            "total_tokens": one.input_tokens + one.output_tokens,
            "prompt_tokens_details": details,
        }

    async def _chunk(self, **fields: Any) -> None:
        model = self.request["model"]
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": model, **fields}
        if self.request.get("service_tier"):
            chunk["service_tier"] = self.charge.tier or "default"
        await self._send(f"data: {json.dumps(chunk)}\n\n".encode())

    async def _event(self, kind: str, **fields: Any) -> None:
        await self._send(f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode())

    async def _send(self, data: bytes) -> None:
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None}
