"""One reply of ``ChatLocal``: the prompt, the row and the messages that the arguments of a call ask for.

A reply is plain text, JSON that follows a schema, or tool calls.

Knows messages, chat templates and grammars. Does not know decoding.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import CallbackManager
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, message_chunk_to_message
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool

from local_backend.langchain.chat_format import (
    REASONING_TAGS,
    answer_metadata,
    chat_prompt,
    copied_texts,
    opened_reasoning,
    sampling_params,
    turn_ends,
)
from local_backend.langchain.structured import ANY_OBJECT, instruction, response_schema
from local_backend.langchain.tools import (
    CallReader,
    Tool,
    ToolFormat,
    chosen_tools,
    require_tools,
    tool_format,
)
from local_backend.langchain.turns import make_turns
from local_backend.sequences.grammar import Alternative, alternatives_grammar, ignored_keywords
from local_backend.sequences.outputs import Update
from local_backend.sequences.request import ContextLengthError
from local_backend.sequences.sequence import Row
from local_backend.sequences.tokenizing import encode_continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReplyFormat:
    """What a reply may be, by the arguments of a call.

    Attributes:
        tools: Those that the model may call.
        shown: Arguments of the chat template, which has documents where it was made for them.
        grammar: What bounds the tokens of the reply, if anything does.
        opening: What the reply begins with, written for the model.
        instruction: What the last question ends with.
        calls: Reads a reply that a grammar may make a call.
        bounds_continuations: Whether the grammar may bound what follows a reply already begun.

    Raises:
        ValueError: The chat template takes no tools, an argument is invalid, or a schema cannot be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        self.tools: list[Tool] = [convert_to_openai_tool(tool) for tool in arguments.get("tools") or ()]
        if others := [tool.get("type") for tool in self.tools if "function" not in tool]:
            raise ValueError(f"tools of vendors run on their servers: give functions, got {others}")
        forced = chosen_tools(self.tools, arguments.get("tool_choice"))
        if arguments.get("tool_choice") == "none":
            self.tools = []
        if self.tools:
            require_tools(tokenizer)
        given = {"tools": self.tools, "documents": arguments.get("documents")}
        self.shown: dict[str, Any] = {name: value for name, value in given.items() if value}
        response_format = arguments.get("response_format")
        schema = response_schema(response_format) if response_format is not None and not forced else None
        self.opening = self.instruction = ""
        self.grammar: str | None = None
        self.calls: CallReader | None = None
        self.bounds_continuations = not forced and schema is None
        if self.bounds_continuations:
            self.grammar = arguments.get("grammar")
            return
        written = (tool_format(tokenizer) if self.tools else None) or ToolFormat({})
        token, before = (None, "") if forced else _control_token(tokenizer, written.opening)
        schemas = [_call_schema(tool, written.arguments) for tool in forced or self.tools]
        alternatives = [Alternative(each, before, token) for each in schemas]
        if forced:
            self.opening = written.opening
            self.calls = CallReader.of_grammar(["{"], "")
        elif self.tools:
            calls = [{"name": tool["function"]["name"], written.arguments: 0} for tool in self.tools]
            starts = [json.dumps(call, ensure_ascii=False)[: -len("0}")] for call in calls]
            shown = encode_continuation(tokenizer, written.opening)
            shown_opening = str(tokenizer.decode(shown, skip_special_tokens=True))
            self.calls = CallReader.of_grammar(starts, shown_opening)
        if schema is not None:
            alternatives.append(Alternative(schema))
            if schema != ANY_OBJECT:
                self.instruction = instruction(schema)
        if ignored := [words for each in alternatives for words in ignored_keywords(each.schema)]:
            warnings.warn(
                f"parts of the schema do not bound the answer, check them yourself: {'; '.join(ignored)}",
                stacklevel=2,
            )
        self.grammar = alternatives_grammar(alternatives)


def _control_token(tokenizer: PreTrainedTokenizerBase, opening: str) -> tuple[int | None, str]:
    """The control token with which an opening begins, if it does, and the rest of it."""
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if opening.startswith(token.content):
            return token_id, opening.removeprefix(token.content)
    return None, opening


def _call_schema(tool: Tool, key: str) -> dict[str, Any]:
    """The schema of a call, which has its arguments under ``key``."""
    function = tool["function"]
    parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
    # References are resolved from the root.
    definitions = {name: parameters.pop(name) for name in ("$defs", "definitions") if name in parameters}
    properties = {"name": {"const": function["name"]}, key: parameters}
    return {"type": "object", "properties": properties, "required": ["name", key], **definitions}


def reply_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[BaseMessage], form: ReplyFormat
) -> tuple[list[int], int]:
    """Token ids of the rendered messages, and how many of the last ones are a reply already begun.

    Raises:
        ValueError: There is no message, one holds more than text, calls cannot be rendered, or a reply is
            begun that is to follow a schema or be a call.
    """
    turns = make_turns(messages)
    if not form.tools and any("tool_calls" in turn for turn in turns):
        require_tools(tokenizer)
    asked = [turn for turn in turns if turn["role"] == "user"]
    if form.instruction and asked:
        asked[-1]["content"] += form.instruction
    if form.grammar is None:
        return chat_prompt(tokenizer, turns, **form.shown)
    prompt, num_begun = chat_prompt(tokenizer, turns, **form.shown, enable_thinking=False)
    if num_begun and form.bounds_continuations:
        return prompt, num_begun
    if num_begun:
        raise ValueError(
            "a reply that follows a schema or calls a tool cannot continue one already begun: the "
            "last message must not be an AIMessage"
        )
    tag = opened_reasoning(tokenizer, prompt)
    closing = f"{REASONING_TAGS[tag]}\n\n" if tag else ""
    return [*prompt, *encode_continuation(tokenizer, closing + form.opening)], 0


class PromptOverflowError(ContextLengthError, ContextOverflowError):
    """:class:`~local_backend.sequences.request.ContextLengthError`, as LangChain calls it."""


class Reply:
    """One reply of ``model``, a ``ChatLocal``.

    Raises:
        ValueError: An argument or message is invalid.
    """

    def __init__(
        self,
        model: Any,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        arguments: Mapping[str, Any],
    ) -> None:
        self._model, tokenizer = model, model.engine.tokenizer
        form = ReplyFormat(tokenizer, arguments)
        self._prompt, self._num_context_tokens = reply_prompt(tokenizer, messages, form)
        self._references = copied_texts(arguments)
        self._num_counted = self._num_written = 0  # tokens: reported as usage, and not yet
        self._calls = form.calls
        may_call = bool(form.tools) and form.grammar is None
        if may_call:
            tag = opened_reasoning(tokenizer, self._prompt)
            prompt_text = str(tokenizer.decode(self._prompt))
            self._calls = CallReader.of_template(tokenizer, form.tools, prompt_text, tag)
        self._params = replace(
            sampling_params(model, stop, arguments),
            stop_token_ids=turn_ends(tokenizer),
            grammar=form.grammar,
            keep_special_tokens=may_call,
        )

    def row(self, listener: Callable[[Update], None]) -> Row:
        """Its row, to submit to the engine."""
        try:
            given = {"references": self._references, "num_context_tokens": self._num_context_tokens}
            row: Row = self._model.engine.make_row(self._prompt, listener, params=self._params, **given)
            return row
        except ContextLengthError as error:
            raise PromptOverflowError(*error.args) from None

    def chunk(self, update: Update) -> ChatGenerationChunk | None:
        """A piece of the message, if there is something new; the last one carries metadata.

        Each one carries the usage since the one before, so that a stream that its reader leaves is counted.
        """
        completion = update.completion
        self._num_written += len(update.token_ids)
        if completion is None and not update.text:
            return None
        message = AIMessageChunk(content=update.text)
        if self._calls is not None:
            message = self._calls.read(update.text, completion.finish_reason if completion else None)
        if completion is not None:
            self._num_written = len(completion.token_ids) - self._num_counted
            message.response_metadata = answer_metadata(completion, self._model, self._params.drafter)
            message.chunk_position = "last"
        elif not (message.content or message.tool_call_chunks or message.additional_kwargs):
            return None
        prompt, answer = 0 if self._num_counted else len(self._prompt), self._num_written
        total = prompt + answer
        message.usage_metadata = UsageMetadata(input_tokens=prompt, output_tokens=answer, total_tokens=total)
        self._num_counted, self._num_written = self._num_counted + answer, 0
        if completion is not None and (drafted := completion.stats.num_drafted):
            accepted = completion.stats.num_accepted  # named as in OpenAI's usage
            details: Any = {"accepted_prediction": accepted, "rejected_prediction": drafted - accepted}
            message.usage_metadata["output_token_details"] = details
        return ChatGenerationChunk(message=message)

    def result(self, last: Update) -> ChatResult:
        """The whole message, from the last update."""
        completion = last.completion
        assert completion is not None
        chunk = self.chunk(Update(completion.text, completion=completion))
        assert chunk is not None
        return ChatResult(generations=[ChatGeneration(message=message_chunk_to_message(chunk.message))])


def warm_up(model: Any) -> None:
    """Do now what the first reply of a ``ChatLocal`` would wait for, without a reply.

    Imports LangChain's tracers, compiles the chat template, reads the vocabulary and runs first forwards.
    """
    CallbackManager.configure()
    with suppress(Exception):  # a template that takes no such message will say so when it is asked
        Reply(model, [HumanMessage("Hello")], None, {}).row(lambda _: None)
    model.engine.warm_up()
