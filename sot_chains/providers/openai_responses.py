"""Completions over OpenAI's Responses wire. Importing this module imports the SDK."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import openai
from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from openai.types.responses import Response, ResponseStreamEvent, ResponseUsage

from sot_chains.providers.base import Delta, SharedPrefix
from sot_chains.providers.headers import rate_limits_of
from sot_chains.providers.openai import READING_ERRORS, OpenAIWire
from sot_chains.providers.vendor import ends_with_reply


class OpenAIResponsesProvider(OpenAIWire):
    """Streams completions over OpenAI's Responses wire.

    Responses are not stored at the vendor (``store=False``) unless a call asks for it. Takes the arguments
    of :class:`~sot_chains.providers.openai.OpenAIProvider` except ``stream_usage``: this wire always counts.
    """

    async def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any], prefix: SharedPrefix | None
    ) -> AsyncGenerator[Delta, None]:
        client = await self._client()
        request = {
            "model": self._model,
            "input": [_item(message) for message in convert_to_openai_messages(list(messages))],
            "stream": True,
            "store": False,
            **({"prompt_cache_key": prefix.key} if prefix and self._is_openai else {}),
            **_fields(parameters),
        }
        try:
            response: openai.AsyncStream[ResponseStreamEvent] = await client.responses.create(**request)
            async with response:
                yield Delta(rate_limits=rate_limits_of(response.response.headers))
                is_finished = False
                async for event in response:
                    match event.type:
                        case "response.output_text.delta" | "response.refusal.delta":
                            yield Delta(event.delta)
                        case "response.completed" | "response.incomplete":
                            is_finished = True
                            yield _last(event.response)
                        case "response.failed":
                            failure = event.response.error
                            raise self._broke_off(failure.message if failure else "no reason was given")
                        case "error":
                            raise self._broke_off(event.message)
        except READING_ERRORS as error:
            raise self._explained(error, prefilled=ends_with_reply(messages)) from error
        if not is_finished:
            raise self._ended_early()


def _item(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the chat wire as an input item of this one."""
    if message["role"] == "tool":
        return {
            "type": "function_call_output",
            "call_id": message["tool_call_id"],
            "output": message["content"],
        }
    content = message["content"]
    if isinstance(content, list):
        content = [_part(part, reply=message["role"] == "assistant") for part in content]
    return {"role": message["role"], "content": content}


def _part(part: dict[str, Any], *, reply: bool) -> dict[str, Any]:
    match part.get("type"):
        case "text":
            return {"type": "output_text" if reply else "input_text", "text": part["text"]}
        case "image_url":
            return {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        case _:
            return part


def _fields(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters by the names of this wire.

    Raises:
        ValueError: A stop string, which this wire does not know.
    """
    fields = dict(parameters)
    if fields.pop("stop", None):
        raise ValueError('the Responses wire takes no stop strings; leave api="responses" away to use them')
    for name in ("max_tokens", "max_completion_tokens"):
        if name in fields:
            fields["max_output_tokens"] = fields.pop(name)
    return fields


def _last(response: Response) -> Delta:
    reason = "stop"
    if response.incomplete_details is not None:
        said = response.incomplete_details.reason
        reason = "length" if said == "max_output_tokens" else said or "incomplete"
    elif any(
        part.type == "refusal" for item in response.output if item.type == "message" for part in item.content
    ):
        reason = "refusal"
    usage = _usage(response.usage) if response.usage else None
    return Delta(usage=usage, finish_reason=reason, response_metadata={"model_name": response.model})


def _usage(usage: ResponseUsage) -> UsageMetadata:
    counted = UsageMetadata(
        input_tokens=usage.input_tokens, output_tokens=usage.output_tokens, total_tokens=usage.total_tokens
    )
    if (read := usage.input_tokens_details) and read.cached_tokens is not None:
        counted["input_token_details"] = InputTokenDetails(cache_read=read.cached_tokens)
    if (written := usage.output_tokens_details) and written.reasoning_tokens is not None:
        counted["output_token_details"] = OutputTokenDetails(reasoning=written.reasoning_tokens)
    return counted
