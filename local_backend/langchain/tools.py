"""Tool calls in the formats of chat templates: which one a template has, and reading it in a stream.

``transformers`` parses what the model writes, by a "response template" that says where calls begin and end. A
tokenizer may bring its own; here are those of common chat templates.

Knows chat templates and LangChain's messages. Does not know engines or grammars.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from transformers.utils.chat_parsing import ResponseParser

from local_backend.langchain.chat_format import REASONING_TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tool = dict[str, Any]
"""A tool in OpenAI's format."""


def _any_of(texts: Sequence[str]) -> str:
    return "(?:" + "|".join(map(re.escape, texts)) + ")"


_REASONING = {
    "open_pattern": rf"{_any_of([*REASONING_TAGS])}\s*",
    "close_pattern": rf"\s*{_any_of([*REASONING_TAGS.values()])}\s*",
    "content": "text",
}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_LLAMA_CALL = r"""\{\s*"(?:name|type|function)"\s*:"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the models of one chat template write calls.

    Attributes:
        field: Of the response template, for calls.
        opening: What a reply that is a call begins with, before its JSON object.
        arguments: The key of a call's arguments, beside its ``name``.
    """

    field: Mapping[str, Any]
    opening: str = ""
    arguments: str = "arguments"


# The first whose pattern is in the chat template. What closes a call may stand in its arguments, too.
_FORMATS = {
    r"<function=": ToolFormat(  # Qwen3-Coder, Qwen 3.5
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        }
    ),
    r"<tool_call>": ToolFormat(  # Hermes, Qwen 2.5 and 3, SmolLM3
        {"open_pattern": r"\s*<tool_call>", "close_pattern": r"(?<=\}\s*)</tool_call>", "content": "json"},
        opening="<tool_call>\n",
    ),
    r"\[ARGS\]": ToolFormat(  # Mistral since its eleventh tokenizer
        {
            "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)"
            r"(?:\[CALL_ID\][^\s\[]*)?(?:\[ARGS\])?\s*(?=\{)",
            "close_pattern": r"(?<=\}\s*)(?=\[TOOL_CALLS\])",
            "content": "json",
            "transform": {"name": "{name}", "arguments": "{content}"},
        }
    ),
    r"\[TOOL_CALLS\]": ToolFormat(  # Mistral
        {"open_pattern": r"\s*\[TOOL_CALLS\]", "content": "json"},
        opening="[TOOL_CALLS] [",
    ),
    r"<\|python_tag\|>|\"parameters\": dictionary": ToolFormat(  # Llama 3
        {
            "open_pattern": rf"(?:\A\s*|<\|python_tag\|>\s*|;\s*)(?={_LLAMA_CALL})",
            "close_pattern": rf"(?=;\s*{_LLAMA_CALL})",
            "content": "json",
        },
        arguments="parameters",
    ),
}
_WORD = {"type": "string", "description": "The word."}
_PARAMETERS = {"type": "object", "properties": {"word": _WORD}, "required": ["word"]}
_PROBE = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look up a word.", "parameters": _PARAMETERS},
}


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template shows tools to the model."""

    def rendered(tools: list[Any] | None) -> object:
        turns = [{"role": "user", "content": "Hello"}]
        return tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)

    has_template = bool(getattr(tokenizer, "chat_template", None))
    return has_template and rendered([_PROBE]) != rendered(None)


def require_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ValueError`` unless the chat template shows tools to the model."""
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
    """The tools of which one must be called by OpenAI's or LangChain's ``choice``; none if the model decides.

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
        known = f"'auto', 'none', 'any' or the name of one of {names}"
        raise ValueError(f"tool_choice is {known}, got {choice!r}")
    return chosen


class CallReader:
    """Reads tool calls out of a reply while it is written; make one by a classmethod.

    Special tokens are no text at the end of a reply; a call that cannot be read was cut off if a grammar
    bounds the reply.
    """

    def __init__(
        self, parser: ResponseParser, *, specials: Sequence[str] = (), is_bound: bool = False
    ) -> None:
        self._parser: ResponseParser | None = parser
        self._specials_at_end = re.compile(f"{_any_of(specials)}+$" if specials else "(?!)")
        self._is_bound = is_bound
        self._num_calls = 0
        self._unread = ""  # what the parser has neither shown nor read as a call

    @classmethod
    def of_template(
        cls, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool], prompt: str, opened_tag: str = ""
    ) -> CallReader:
        """Reads a reply in which the model may call tools.

        The reply may have begun at the end of ``prompt``; ``opened_tag`` opens a block of reasoning there.

        Raises:
            ValueError: It is not known how the chat template writes calls.
        """
        specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        template, prefix = getattr(tokenizer, "response_template", None), prompt
        if template is None:
            if (known := tool_format(tokenizer)) is None:
                raise ValueError(
                    "this model's chat template takes tools, but how the model writes calls is not known: "
                    "set tokenizer.response_template, see transformers' parse_response, or force a call by "
                    "tool_choice"
                )
            content = {"content": "text", **({"close": specials} if specials else {})}
            field = {"content_args": {"allow_non_json": True}, **known.field}  # `_parse` reads more
            fields = {"reasoning_content": _REASONING, "tool_calls": field, "content": content}
            template, prefix = {"start_anchor_pattern": "(?!)", "fields": fields}, opened_tag
        return cls(ResponseParser(template, prefix=prefix, tools=list(tools)), specials=specials)

    @classmethod
    def of_grammar(cls, starts: Sequence[str], opening: str) -> CallReader:
        """Reads a reply that a grammar makes a call, or something else that begins otherwise.

        A call's JSON begins with one of ``starts``, after ``opening`` without special tokens.
        """
        call = {
            "open_pattern": rf"\A\s*{re.escape(opening.strip())}\s*(?={_any_of(starts)})",
            "content": "json",
        }
        fields = {"tool_calls": call, "content": {"content": "text"}}
        template = {"start_anchor_pattern": "(?!)", "fields": fields}
        return cls(ResponseParser(template, prefix=""), is_bound=True)

    def read(self, text: str, finish_reason: str | None) -> AIMessageChunk:
        """What a piece of the reply adds to the message; a call is added when it is complete.

        A call that cannot be read stays text, and so does what follows it.

        Raises:
            OutputParserException: A call that a grammar bounds was cut off.
        """
        if finish_reason is not None:
            text = self._specials_at_end.sub("", text)
        content = ""
        more: dict[str, str] = {}
        calls: list[ToolCallChunk] = []
        # One by one, so that an error leaves what is before it.
        for letter in [*text, *([None] if finish_reason is not None else [])]:
            self._unread += letter or ""
            try:
                for field, value in self._parse(letter):
                    if field == "content":
                        content += value
                        self._unread = self._unread.removeprefix(value)
                        continue
                    self._unread = ""
                    if field == "reasoning_content":
                        more[field] = more.get(field, "") + value
                    else:
                        name, arguments = value
                        args, index = json.dumps(arguments, ensure_ascii=False), self._num_calls + len(calls)
                        calls.append(
                            tool_call_chunk(name=name, args=args, id=uuid.uuid4().hex[:9], index=index)
                        )
            except (ValueError, KeyError) as error:
                if self._is_bound:
                    raise OutputParserException(
                        f"the tool call was cut off (finish_reason {finish_reason!r}): raise max_tokens, and "
                        f"do not set stop; it ends with {self._unread[-200:]!r}",
                        llm_output=self._unread,
                    ) from error
                self._parser = None
            if self._parser is None:
                content, self._unread = content + self._unread, ""
        self._num_calls += len(calls)
        return AIMessageChunk(content=content, tool_call_chunks=calls, additional_kwargs=more)

    def _parse(self, letter: str | None) -> Iterator[tuple[str, Any]]:
        """Text, reasoning and calls that a letter completes, or the end of the reply."""
        if self._parser is None:
            return
        for event in self._parser.finalize()[1] if letter is None else self._parser.feed(letter):
            field, kind = event["field"], event["type"]
            if field == "content" or field in _REASONING_FIELDS:
                if kind == "region_chunk":
                    yield ("content" if field == "content" else "reasoning_content"), event["text"]
            elif kind == "region_close":
                value = event["value"]
                if isinstance(value, str):  # JSON but for line feeds within strings, as small models write it
                    value = json.loads(value, strict=False)
                values = value if isinstance(value, list) else [value]
                yield from [("call", _parse_call(each)) for each in values]


def _parse_call(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call as models write it.

    Raises:
        ValueError: It is no call.
    """
    call = value.get("function", value) if isinstance(value, Mapping) else {}
    if isinstance(call, str):  # Llama: {"type": "function", "function": "name", "parameters": {}}
        call = {**value, "name": call}
    given = call.get("arguments", call.get("parameters", ""))
    arguments = json.loads(given, strict=False) if isinstance(given, str) else {} if given is None else given
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError(f"this is no tool call: {value!r}")
    return call["name"], arguments
