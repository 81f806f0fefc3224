"""Structured output: a schema bounds the tokens of an answer, and the answer is parsed as LangChain does.

Knows the schemas that LangChain takes, OpenAI's ``response_format`` and output parsers. Does not know models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import EnumType
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

ANY_OBJECT = {"type": "object"}
"""The schema of ``{"type": "json_object"}``."""


def response_schema(response_format: Any) -> dict[str, Any] | None:
    """The JSON schema that OpenAI's ``response_format`` asks for; ``None`` for plain text.

    Raises:
        ValueError: It is something else.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return dict(ANY_OBJECT)
    described = response_format.get("json_schema") if kind == "json_schema" else None
    if isinstance(described, Mapping) and isinstance(described.get("schema"), Mapping):
        return dict(described["schema"])
    raise ValueError(
        'response_format is {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}, '
        f'{{"type": "json_object"}} or {{"type": "text"}}, got {response_format!r:.200}'
    )


def instruction(schema: Mapping[str, Any]) -> str:
    """The end of a question that shows the schema to the model, with its descriptions."""
    return f"\n\nAnswer with JSON that follows this schema:\n{json.dumps(schema, ensure_ascii=False)}"


def with_structured_output(
    model: BaseChatModel, schema: Any, *, method: str, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """See :meth:`~local_backend.ChatLocal.with_structured_output`; ``model`` takes ``response_format``.

    Raises:
        ValueError: The method is unknown, or ``schema`` is no schema.
    """
    response_format: dict[str, Any] = {"type": "json_object"}
    if method == "json_schema":
        json_schema = find_json_schema(schema)
        name = json_schema.get("title", "answer")
        response_format = {"type": "json_schema", "json_schema": {"name": name, "schema": json_schema}}
    elif method != "json_mode":
        raise ValueError(
            f"method is 'json_schema', 'json_mode' or 'function_calling', but got {method!r}: "
            "the first works with every model"
        )
    bound = model.bind(
        response_format=response_format,
        ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
    )
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Runnable[Any, Any] = _WholePydantic(pydantic_object=schema) if is_class else _WholeJson()
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")


def find_json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema of what LangChain takes as one.

    Raises:
        ValueError: It is no schema.
    """
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return schema.model_json_schema()
    if isinstance(schema, Mapping) and not {"name", "toolSpec", "function"} & schema.keys():
        return dict(schema)  # it needs no title here
    try:
        if isinstance(schema, EnumType):
            raise TypeError("it is an enumeration")
        return convert_to_json_schema(schema)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"no schema follows from {schema!r:.80} ({error!s:.120}): give a pydantic class, a TypedDict or "
            "a JSON schema, of which lists and alternatives are fields"
        ) from error


def _check_whole(result: list[Generation]) -> None:
    """Raise if an answer has ended before it was complete; parsers would mend it silently."""
    message = getattr(result[0], "message", None)
    if not isinstance(message, AIMessage) or not (reason := message.response_metadata.get("finish_reason")):
        return  # it is still being written
    text = result[0].text
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        num_tokens = message.usage_metadata["output_tokens"] if message.usage_metadata else "some"
        ended = (
            "a stop string ended it: omit stop" if reason != "length" else "raise max_tokens, or ask for less"
        )
        said = f"the answer was cut off after {num_tokens} tokens, before its JSON was complete; {ended}"
        raise OutputParserException(f"{said}; it ends with {text[-200:]!r}", llm_output=text) from error


class _WholeJson(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)


class _WholePydantic(_WholeJson, PydanticOutputParser[Any]):
    """Parses the object as :class:`PydanticOutputParser`, which is itself a :class:`JsonOutputParser`."""
