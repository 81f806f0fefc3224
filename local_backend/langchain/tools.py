"""Calls of tools in the formats of chat templates: which one a template has, and reading it in a stream.

``transformers`` parses what the model writes, by a "response template" that says where calls begin and end. A
tokenizer may bring its own; here are those of common chat templates.

Knows chat templates and LangChain's messages. Does not know engines or grammars.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from transformers.utils.chat_parsing import ResponseParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tool = dict[str, Any]
"""A tool in OpenAI's format."""

_REASONING = {
    "open_pattern": r"(?:<think(?:ing)?>|\[THINK\]|◁think▷|<seed:think>|<\|START_THINKING\|>)\s*",
    "close_pattern": r"\s*(?:</think(?:ing)?>|\[/THINK\]|◁/think▷|</seed:think>|<\|END_THINKING\|>)\s*",
    "content": "text",
}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_LLAMA_CALL = r"""\{\s*"(?:name|type|function)"\s*:"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the models of one chat template write calls.

    Attributes:
        fields: Of the response template; JSON as :func:`_call_of` reads it.
        opening: What a reply that is a call begins with, before its JSON object.
        arguments: The key of a call's arguments, beside its ``name``.
    """

    fields: Mapping[str, Any]
    opening: str = ""
    arguments: str = "arguments"


# The first whose pattern is in the chat template.
_FORMATS = {
    r"<function=": ToolFormat(  # Qwen3-Coder, Qwen 3.5
        {
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
                },
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            }
        }
    ),
    r"<tool_call>": ToolFormat(  # Hermes, Qwen 2.5 and 3, SmolLM3
        {"tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json"}},
        opening="<tool_call>\n",
    ),
    r"\[ARGS\]": ToolFormat(  # Mistral since its eleventh tokenizer
        {
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)"
                r"(?:\[CALL_ID\][^\s\[]*)?(?:\[ARGS\])?\s*(?=\{)",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                "content": "json",
                "transform": {"name": "{name}", "arguments": "{content}"},
            }
        }
    ),
    r"\[TOOL_CALLS\]": ToolFormat(  # Mistral
        {"tool_calls": {"open_pattern": r"\s*\[TOOL_CALLS\]", "content": "json"}},
        opening="[TOOL_CALLS] [",
    ),
    r"<\|python_tag\|>|\"parameters\": dictionary": ToolFormat(  # Llama 3
        {
            "tool_calls": {
                "open_pattern": rf"(?:\A\s*|<\|python_tag\|>\s*|;\s*)(?={_LLAMA_CALL})",
                "close_pattern": rf"(?=;\s*{_LLAMA_CALL})",
                "content": "json",
            }
        },
        arguments="parameters",
    ),
}
_PROBE = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template shows tools to the model."""

    def rendered(tools: list[Any] | None) -> object:
        turns = [{"role": "user", "content": "Hello"}]
        return tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)

    has_template = bool(getattr(tokenizer, "chat_template", None))
    return has_template and rendered([_PROBE]) != rendered(None)


def require_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the chat template shows tools to the model.

    Raises:
        ValueError: It does not.
    """
    if not takes_tools(tokenizer):
        raise ValueError(
            "this model's chat template takes no tools, so it was not trained to call them: use a model "
            "whose template does, or with_structured_output, which works with every model"
        )


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """The format in which the chat template writes calls; ``None`` if it is none of the known."""
    template = str(tokenizer.get_chat_template(tools=[_PROBE]))
    return next((each for pattern, each in _FORMATS.items() if re.search(pattern, template)), None)


def chosen_tools(tools: Sequence[Tool], choice: Any) -> list[Tool]:
    """The tools of which one must be called; none if the model decides.

    Args:
        tools: All of them.
        choice: ``None``, ``False``, ``"auto"`` or ``"none"``; ``True``, ``"any"`` or ``"required"``; a tool's
            name, or OpenAI's ``{"type": "function", "function": {"name": ...}}``.

    Raises:
        ValueError: There is no such tool.
    """
    if choice in (None, False, "auto", "none"):
        return []
    if choice in (True, "any", "required"):
        return list(tools)
    name = choice["function"]["name"] if isinstance(choice, Mapping) and "function" in choice else choice
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        names = [tool["function"]["name"] for tool in tools]
        raise ValueError(
            f"tool_choice is 'auto', 'none', 'any' or the name of one of {names}, got {choice!r}"
        )
    return chosen


def template_turns(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as chat templates expect them.

    Arguments are objects rather than JSON, results have their tool's name, and identifiers have the nine
    letters and digits that Mistral's templates insist on.
    """
    names: dict[str, str] = {}
    converted = []
    for turn in map(dict, turns):
        if turn.get("tool_calls"):
            calls = []
            for call in turn["tool_calls"]:
                function = call["function"]
                names[call["id"]] = function["name"]
                arguments = json.loads(function["arguments"] or "{}")
                function = {"name": function["name"], "arguments": arguments}
                calls.append({"type": "function", "id": _short(call["id"]), "function": function})
            turn["tool_calls"] = calls
        if "tool_call_id" in turn:
            turn.setdefault("name", names.get(turn["tool_call_id"], ""))
            turn["tool_call_id"] = _short(turn["tool_call_id"])
        converted.append(turn)
    return converted


def _short(identifier: str) -> str:
    return hashlib.sha256(str(identifier).encode("utf-8", "replace")).hexdigest()[:9]


class CallReader:
    """Reads a reply in which the model may call tools, while it is written.

    Args:
        tokenizer: The model's.
        tools: Their schemas say the types of arguments that are written without.
        prompt: As text; a reply may have begun at its end.
        opened_reasoning: The tag with which the prompt opens a block of reasoning, if it does.

    Raises:
        ValueError: It is not known how the chat template writes calls.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Tool],
        prompt: str,
        opened_reasoning: str = "",
    ) -> None:
        specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._specials_at_end = re.compile(f"(?:{'|'.join(map(re.escape, specials)) or '(?!)'})+$")
        template, prefix = getattr(tokenizer, "response_template", None), prompt
        if template is None:
            if (known := tool_format(tokenizer)) is None:
                raise ValueError(
                    "this model's chat template takes tools, but how the model writes calls is not known: "
                    "set tokenizer.response_template, see transformers' parse_response, or force a call by "
                    "tool_choice"
                )
            content = {"content": "text", **({"close": specials} if specials else {})}
            template = {
                "start_anchor_pattern": "(?!)",
                "fields": {"reasoning_content": _REASONING, **known.fields, "content": content},
            }
            prefix = opened_reasoning
        self._parser = ResponseParser(template, prefix=prefix, tools=list(tools))
        self._num_calls = 0
        self._unread = ""  # what the parser has neither shown nor read as a call
        self._is_readable = True

    def read(self, text: str, finish_reason: str | None) -> AIMessageChunk:
        """What a piece of the reply adds to the message; a call is added when it is complete.

        A call that cannot be read stays text, and so does what follows it.

        Args:
            text: The piece.
            finish_reason: Why the reply has ended, if it has.
        """
        if finish_reason is not None:
            text = self._specials_at_end.sub("", text)
        chunk = AIMessageChunk(content="")
        place = 0
        try:
            # One by one, so that an error leaves what is before it.
            while self._is_readable and place < len(text):
                place += 1
                self._unread += text[place - 1]
                chunk = self._add(chunk, self._parser.feed(text[place - 1]))
            if self._is_readable and finish_reason is not None:
                chunk = self._add(chunk, self._parser.finalize()[1])
        except (ValueError, KeyError):
            self._is_readable = False
            chunk += AIMessageChunk(content=self._unread)
        return chunk + AIMessageChunk(content=text[place:]) if place < len(text) else chunk

    def _add(self, chunk: AIMessageChunk, events: Sequence[dict[str, Any]]) -> AIMessageChunk:
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_chunk" and field == "content":
                self._unread = self._unread.removeprefix(event["text"])
                chunk += AIMessageChunk(content=event["text"])
            elif kind == "region_chunk" and field in _REASONING_FIELDS:
                self._unread = ""
                chunk += AIMessageChunk(content="", additional_kwargs={"reasoning_content": event["text"]})
            elif kind == "region_close" and field not in ("content", *_REASONING_FIELDS):
                value = event["value"]
                calls = [_call_of(call) for call in (value if isinstance(value, list) else [value])]
                chunks = [_chunk(*call, self._num_calls + number) for number, call in enumerate(calls)]
                self._unread = ""
                self._num_calls += len(chunks)
                chunk += AIMessageChunk(content="", tool_call_chunks=chunks)
        return chunk


class BoundReader:
    """Reads a reply that a grammar makes the JSON object of a call, or something else if that may be, too.

    Args:
        calls: What each call can begin with.
        opening: What precedes a call, without special tokens.
    """

    def __init__(self, calls: Sequence[str], opening: str) -> None:
        self._starts = [opening.lstrip() + call for call in calls]
        self._opening = opening.lstrip()
        self._text = ""
        self._may_be_call = True

    def read(self, text: str, finish_reason: str | None) -> AIMessageChunk:
        """What a piece of the reply adds to the message; a call is added when it is complete.

        Raises:
            OutputParserException: The call was cut off.
        """
        if not self._may_be_call:
            return AIMessageChunk(content=text)
        self._text += text
        begun = self._text.lstrip()
        self._may_be_call = any(start.startswith(begun) or begun.startswith(start) for start in self._starts)
        if not self._may_be_call:
            return AIMessageChunk(content=self._text)
        if finish_reason is None:
            return AIMessageChunk(content="")
        try:
            call = _call_of(json.loads(begun[len(self._opening) :]))
        except ValueError as error:
            raise OutputParserException(
                f"the call of a tool was cut off (finish_reason {finish_reason!r}): raise max_tokens, and do "
                f"not set stop; it ends with {self._text[-200:]!r}",
                llm_output=self._text,
            ) from error
        return AIMessageChunk(content="", tool_call_chunks=[_chunk(*call, 0)])


def _call_of(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call as models write it.

    Raises:
        ValueError: It is no call.
    """
    call = value.get("function", value) if isinstance(value, Mapping) else {}
    if isinstance(call, str):  # Llama: {"type": "function", "function": "name", "parameters": {}}
        call = {**value, "name": call}
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError(f"this is no call of a tool: {value!r}")
    return call["name"], arguments


def _chunk(name: str, arguments: Mapping[str, Any], index: int) -> ToolCallChunk:
    args = json.dumps(arguments, ensure_ascii=False)
    return tool_call_chunk(name=name, args=args, id=uuid.uuid4().hex[:9], index=index)
