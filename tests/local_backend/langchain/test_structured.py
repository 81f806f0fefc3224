"""``with_structured_output`` and ``response_format``: objects that follow a schema, whole or in pieces."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from local_backend import ChatLocal
from local_backend.langchain.structured import response_schema
from sot_chains.outline.reader import outline_grammar
from tests.tiny import tiny_chat

TEXT = "Anna is 31 years old. She likes chess and swimming."


class Person(BaseModel):
    """A person."""

    name: str = Field(description="The first name.", max_length=12)
    age: int
    hobbies: list[Literal["chess", "swimming", "tennis"]] = Field(max_length=3)


class PersonDict(TypedDict):
    """A person."""

    name: Literal["Anna", "Ben"]
    age: int


class Node(BaseModel):
    """A tree, whose schema refers to itself."""

    value: Literal["a", "b"]
    children: list[Node] = Field(default=[], max_length=1)


def test_the_default_model_fills_a_schema(default_chat: ChatLocal) -> None:
    chunks = list(default_chat.with_structured_output(Person.model_json_schema()).stream(TEXT))
    found = Person.model_validate(chunks[-1])
    assert (found.name, found.age, found.hobbies[0]) == ("Anna", 31, "chess")
    assert len(chunks) > 3
    for chunk in chunks:  # each is the start of the whole
        assert list(found.model_dump())[: len(chunk)] == list(chunk)
        assert found.name.startswith(chunk.get("name", ""))


async def test_every_kind_of_schema_and_every_way_of_calling(chat: ChatLocal) -> None:
    openai = {"name": "person", "parameters": Person.model_json_schema()}
    untitled = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 3}
    for schema, kind in (
        (Person, Person),
        (PersonDict, dict),
        (Person.model_json_schema(), dict),
        (openai, dict),
        (Node, Node),
        (untitled, list),
    ):
        chain = chat.with_structured_output(schema)
        value = chain.invoke(TEXT, max_tokens=120)
        assert isinstance(value, kind), schema
        assert await chain.ainvoke(TEXT, max_tokens=120) == value
        assert list(chain.stream(TEXT, max_tokens=120))[-1] == value
        assert [chunk async for chunk in chain.astream(TEXT, max_tokens=120)][-1] == value
        assert chain.batch([TEXT, TEXT], max_tokens=120) == [value, value]


def test_a_batch_may_have_a_schema_for_each_row(chat: ChatLocal) -> None:
    prompt = ChatPromptTemplate.from_messages([("user", "{text}")])
    constants = [chat.with_structured_output({"const": f"number {number}"}) for number in range(6)]
    chain = prompt | {str(number): constant for number, constant in enumerate(constants)}
    assert chain.invoke({"text": TEXT}) == {str(number): f"number {number}" for number in range(6)}


def test_include_raw_keeps_the_message_and_the_error(chat: ChatLocal) -> None:
    found = chat.with_structured_output(PersonDict, include_raw=True).invoke(TEXT)
    assert set(found) == {"raw", "parsed", "parsing_error"}
    assert json.loads(found["raw"].text) == found["parsed"]
    assert found["parsing_error"] is None
    short = chat.model_copy(update={"max_tokens": 4})
    cut = short.with_structured_output(PersonDict, include_raw=True).invoke(TEXT)
    assert cut["parsed"] is None
    assert isinstance(cut["parsing_error"], OutputParserException)
    assert cut["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("schema", [Person, Person.model_json_schema()])
def test_an_answer_that_was_cut_is_no_object(schema: Any, chat: ChatLocal) -> None:
    """Parsers of partial JSON would mend it."""
    chain = chat.with_structured_output(schema)
    for call in (chain.invoke, lambda text, **kwargs: list(chain.stream(text, **kwargs))):
        with pytest.raises(OutputParserException, match=r"cut off after 7 tokens, .* raise max_tokens"):
            call(TEXT, max_tokens=7)
        with pytest.raises(OutputParserException, match=r"cut off .* a stop string ended it"):
            call(TEXT, stop=['"age"'])


def test_response_format_is_openais(chat: ChatLocal) -> None:
    schema = {"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}
    asked = {"type": "json_schema", "json_schema": {"name": "state", "strict": True, "schema": schema}}
    assert set(json.loads(chat.invoke(TEXT, response_format=asked).text)) == {"done"}
    assert chat.invoke(TEXT, response_format={"type": "json_object"}, max_tokens=30).text.startswith("{")
    assert chat.invoke(TEXT, response_format={"type": "text"}).text == chat.invoke(TEXT).text
    for wrong in ({"type": "json_schema"}, {"type": "xml"}, "json", Person):
        with pytest.raises(ValueError, match="response_format is"):
            response_schema(wrong)


def test_json_mode_takes_any_object(default_chat: ChatLocal) -> None:
    chain = default_chat.with_structured_output(None, method="json_mode")
    assert isinstance(chain.invoke(f"{TEXT} Answer in JSON with her name and age."), dict)


def test_without_tools_in_the_template_a_call_is_json(chat: ChatLocal) -> None:
    values = [
        chat.with_structured_output(PersonDict, method=method).invoke(TEXT)
        for method in ("function_calling", "json_schema")
    ]
    assert values[0] == values[1]


def test_the_question_shows_the_schema(chat: ChatLocal) -> None:
    raw = chat.with_structured_output(PersonDict, include_raw=True).invoke(TEXT)["raw"]
    plain = chat.invoke(TEXT, max_tokens=2)
    assert raw.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"] + 40


def test_what_cannot_be_used_is_an_error_or_a_warning(chat: ChatLocal) -> None:
    for arguments, words in (
        ({"method": "regex"}, "method is 'json_schema'"),
        ({"tools": []}, r"unknown arguments \['tools'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            chat.with_structured_output(Person, **arguments)
    with pytest.raises(ValueError, match="this schema cannot bound an answer"):
        chat.with_structured_output({"type": "string", "pattern": "(?=a)"}).invoke(TEXT)
    with pytest.raises(ValueError, match="cannot continue one already begun"):
        chat.with_structured_output(Person).invoke([HumanMessage(TEXT), AIMessage('{"name"')])
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    with pytest.warns(UserWarning, match="do not bound the answer.*uniqueItems"):
        chat.with_structured_output(unique).invoke(TEXT)


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("<think>\n", "<think>\n</think>\n\n"), ("[THINK]", "[THINK][/THINK]\n\n"), ("", "")],
)
def test_a_block_of_reasoning_that_the_template_opens_is_closed(opening: str, closing: str) -> None:
    with tiny_chat() as chat:
        tokenizer = chat.engine.tokenizer
        reply = f"{{{{ '{opening}' }}}}".replace("\n", "\\n")
        tokenizer.chat_template = (
            f"{tokenizer.chat_template}{{% if add_generation_prompt %}}{reply}{{% endif %}}"
        )
        prompts: list[tuple[int, ...]] = []
        make_row = chat.engine.make_row

        def noted(prompt: Any, *args: Any, **kwargs: Any) -> Any:
            prompts.append(tuple(prompt))
            return make_row(prompt, *args, **kwargs)

        chat.engine.make_row = noted  # type: ignore[method-assign]  # notes the prompt
        assert chat.with_structured_output({"const": 7}).invoke(TEXT) == 7
    assert tokenizer.decode(prompts[0]).endswith(f"<|im_start|>assistant\n{closing}")


def test_a_grammar_bounds_what_follows_a_reply_already_begun(chat: ChatLocal) -> None:
    """The outlines of Skeleton-of-Thought are; the tiny model would write anything."""
    grammar = outline_grammar(4, num_words=3, question=TEXT)
    for seed in range(8):
        reply = chat.invoke(
            [HumanMessage(TEXT), AIMessage("1.")],
            grammar=grammar,
            temperature=2.0,
            seed=seed,
            max_tokens=200,
        )
        if reply.response_metadata["finish_reason"] == "length":
            continue
        headings = re.split(r"\n\d\.", reply.text)
        assert 1 <= len(headings) <= 4
        assert all(1 <= len(heading.strip(" ").split(" ")) <= 3 for heading in headings)
        assert ":" not in reply.text


def test_half_a_character_in_a_schema_a_grammar_or_a_tool_is_replaced(chat: ChatLocal) -> None:
    schema = {"type": "object", "properties": {"a\ud83d": {"const": "\ud83d"}}, "required": ["a\ud83d"]}
    described = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with_format = chat.invoke("Hi", response_format=described, max_tokens=40)
    assert json.loads(with_format.text) == {"a\ufffd": "\ufffd"}
    assert chat.invoke("Hi", grammar='start: "b\ud83d"').text == "b\ufffd"
    assert chat.invoke("Hi", grammar="start: /b\ud83d/").text == "b\ufffd"
    assert chat.invoke("\ud83d", references=["\ud83d"], stop=["\ud83d"], max_tokens=2).text


@pytest.mark.parametrize(
    "schema", [{"properties": 5}, {"anyOf": 5}, {"type": "array", "items": 5}, {"$ref": "#/$defs/a"}]
)
def test_a_schema_that_is_none_is_an_error_of_its_own(chat: ChatLocal, schema: dict[str, Any]) -> None:
    described = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", **schema}}}
    with pytest.raises(ValueError, match="this schema cannot bound an answer"):
        chat.invoke("Hi", response_format=described)
    assert chat.invoke("Hi", max_tokens=2).text


def test_what_is_no_schema_says_what_is(chat: ChatLocal) -> None:
    for wrong in (list[int], int | str, Literal["a"], Enum("E", "a b"), int, None, "name"):
        with pytest.raises(ValueError, match="no schema follows from"):
            chat.with_structured_output(wrong)
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="recursion limit exceeded"):
        chat.with_structured_output(deep).invoke("Hi")
