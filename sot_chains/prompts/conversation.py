"""The user's conversation, in which our requests can replace the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue


@dataclass(frozen=True)
class Conversation:
    """A conversation whose last human message asks the question."""

    messages: tuple[BaseMessage, ...]  # as given, without lone surrogates
    question: str  # the text of the last human message; blank only if none is needed
    index: int  # of that message

    @classmethod
    def of(cls, model_input: LanguageModelInput, *, needs_question: bool = True) -> Conversation:
        """Reads the input of a chat model: a string, messages in any form, or a prompt value.

        Raises:
            TypeError: ``model_input`` is none of these.
            ValueError: There is no human message, or the last one has no text, and ``needs_question``.
        """
        messages = tuple(map(_cleaned, _messages(model_input)))
        index = len(messages) - 1
        while index >= 0 and not isinstance(messages[index], HumanMessage):
            index -= 1
        if not needs_question:
            return cls(messages, str(messages[index].text).strip() if index >= 0 else "", index)
        if index < 0:
            kinds = [message.type for message in messages]
            raise ValueError(f"there is no question: expected a human message, got messages of types {kinds}")
        question = str(messages[index].text).strip()
        if not question:
            raise ValueError(
                f"the question is empty: the last human message says {messages[index].content!r:.80}; "
                "expected text that asks something"
            )
        return cls(messages, question, index)

    @property
    def ends_with_question(self) -> bool:
        """Whether there is a question that no message follows, such as a tool result or a partial reply."""
        return bool(self.question) and self.index == len(self.messages) - 1

    def asking(self, request: str, examples: Sequence[tuple[str, str]] = ()) -> list[BaseMessage]:
        """The conversation with ``request`` in place of the question, whose images are kept.

        Args:
            request: The text that replaces the question.
            examples: Pairs of request and reply, inserted after the system messages.
        """
        question = self.messages[self.index]
        content: Any = request
        if isinstance(parts := question.content, list):
            others = [part for part in parts if isinstance(part, dict) and part.get("type") != "text"]
            content = [*others, {"type": "text", "text": request}] if others else request
        asked = question.model_copy(update={"content": content})
        messages = [*self.messages[: self.index], asked, *self.messages[self.index + 1 :]]
        if examples:
            turns = [turn for asked, reply in examples for turn in (HumanMessage(asked), AIMessage(reply))]
            begin = next(i for i, message in enumerate(messages) if not isinstance(message, SystemMessage))
            messages[begin:begin] = turns
        return messages


def _messages(model_input: LanguageModelInput) -> Sequence[BaseMessage]:
    if isinstance(model_input, str):
        return [HumanMessage(content=model_input)]
    if isinstance(model_input, PromptValue):
        return model_input.to_messages()
    if isinstance(model_input, Sequence):
        return convert_to_messages(model_input)
    raise TypeError(
        "SkeletonOfThought takes what a chat model takes, a string, a list of messages or a prompt value, "
        f"got {type(model_input).__name__}"
    )


def _cleaned(message: BaseMessage) -> BaseMessage:
    calls, broken = getattr(message, "tool_calls", []), getattr(message, "invalid_tool_calls", [])
    if isinstance(message.content, str) and message.content.isascii() and not calls and not broken:
        return message  # the usual case
    update = {"content": without_surrogates(message.content)}
    if calls or broken:
        update |= {"tool_calls": without_surrogates(calls), "invalid_tool_calls": without_surrogates(broken)}
    return message.model_copy(update=update)


def without_surrogates(value: Any) -> Any:
    """``value`` with pairs of surrogates joined to characters, and lone ones replaced.

    Neither tokenizers nor UTF-8 take them. They come from text that was cut between the halves of an emoji.
    """
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(part) for name, part in value.items()}
    return [without_surrogates(part) for part in value] if isinstance(value, list) else value
