"""The events of a streamed reply on OpenAI's and on Anthropic's wire."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from benchmarks.vendor_account import Charge


@dataclass
class ReplyStream:
    """The events of one reply, on either wire."""

    request: dict[str, Any]
    charge: Charge
    wire: str
    writer: asyncio.StreamWriter

    async def begin(self) -> None:
        """Sends the first event."""
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
        if self.wire == "openai":
            return await self._chunk(choices=[_choice({"content": token})])
        await self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": token})

    async def end(self, reason: str) -> None:
        """Sends why the reply has ended, and its usage."""
        if self.wire == "openai":
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
