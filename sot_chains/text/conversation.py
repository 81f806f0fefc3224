"""What the user sent, as a conversation in which the question can be replaced by requests of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue


@dataclass(frozen=True)
class Conversation:
    """Messages, the last human one of which asks the question.

    Attributes:
        messages: The conversation as it was given.
        question: The text of its last human message, never blank.
        place: Where in ``messages`` that message stands.
    """

    messages: tuple[BaseMessage, ...]
    question: str
    place: int

    @classmethod
    def of(cls, model_input: LanguageModelInput) -> Conversation:
        """Reads whatever a chat model takes: a string, messages in any form, a prompt value.

        Raises:
            TypeError: It is none of these.
            ValueError: It asks nothing: no human message, or one without text.
        """
        messages = tuple(_messages(model_input))
        place = next(
            (i for i in reversed(range(len(messages))) if isinstance(messages[i], HumanMessage)), None
        )
        if place is None:
            kinds = [message.type for message in messages]
            raise ValueError(f"there is no question: expected a human message, got messages of types {kinds}")
        question = str(messages[place].text).strip()
        if not question:
            raise ValueError(
                f"the question is empty: the last human message says {messages[place].content!r:.80}; "
                "expected text that asks something"
            )
        return cls(messages, question, place)

    @property
    def ends_with_question(self) -> bool:
        """Whether nothing follows the question: no tool result, no reply begun by the user."""
        return self.place == len(self.messages) - 1

    def asking(
        self,
        request: str,
        *,
        reply_start: str | None = None,
        examples: Sequence[tuple[str, str]] = (),
    ) -> list[BaseMessage]:
        """The conversation with ``request`` in place of the question.

        What the question carries besides text (an image, say) stays with it.

        Args:
            request: What is asked instead.
            reply_start: Added as the beginning of the model's reply.
            examples: Requests and replies that stand before the conversation, behind system messages.
        """
        question = self.messages[self.place]
        asked = question.model_copy(update={"content": _with_text(question.content, request)})
        messages = [*self.messages[: self.place], asked, *self.messages[self.place + 1 :]]
        if examples:
            num_system = next(
                i for i, message in enumerate(messages) if not isinstance(message, SystemMessage)
            )
            turns = [
                message
                for example_request, reply in examples
                for message in (HumanMessage(content=example_request), AIMessage(content=reply))
            ]
            messages[num_system:num_system] = turns
        return messages if reply_start is None else [*messages, AIMessage(content=reply_start)]


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


def _with_text(content: str | list[str | dict[Any, Any]], text: str) -> str | list[str | dict[Any, Any]]:
    if isinstance(content, str):
        return text
    others = [block for block in content if isinstance(block, dict) and block.get("type") != "text"]
    return [*others, {"type": "text", "text": text}] if others else text
