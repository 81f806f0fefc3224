"""Reads messages: the question, earlier turns and prefill of an input; text and usage of a reply.

Knows LangChain's messages. Does not know retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    convert_to_messages,
)
from langchain_core.prompt_values import PromptValue

from retrieval_copy.citations.questions import is_follow_up
from sot_chains.providers.replies import LoopGuard


@dataclass(frozen=True)
class Conversation:
    """A question with its earlier turns."""

    messages: tuple[BaseMessage, ...]
    system: tuple[BaseMessage, ...]
    history: tuple[BaseMessage, ...]  # before the question, without system messages
    question: str  # text of the last human message, never blank
    after: tuple[BaseMessage, ...]  # such as an assistant prefill

    @classmethod
    def of(cls, model_input: LanguageModelInput) -> Conversation:
        """Reads any input of a chat model: a string, messages in any form, or a prompt value.

        Raises:
            TypeError: The input is none of these.
            ValueError: The input contains no question.
        """
        messages = _messages(model_input)
        asked_at = [number for number, message in enumerate(messages) if isinstance(message, HumanMessage)]
        if not asked_at:
            kinds = [message.type for message in messages]
            raise ValueError(
                f"there is nothing to answer: expected a human message, got types {kinds}; "
                "give the question as a string or as the last human message"
            )
        last = asked_at[-1]
        before, asked, after = messages[:last], messages[last], messages[last + 1 :]
        question = str(asked.text).strip()
        if not question:
            raise ValueError(f"the question is empty: the last human message says {asked.content!r:.80}")
        return cls(
            messages=tuple(messages),
            system=tuple(message for message in before if isinstance(message, SystemMessage)),
            history=tuple(message for message in before if not isinstance(message, SystemMessage)),
            question=question,
            after=tuple(after),
        )

    @property
    def begun_reply(self) -> str:
        """The assistant prefill: the start of the answer if the user wrote one, else ``""``."""
        return str(self.after[-1].text) if self.after and isinstance(self.after[-1], AIMessage) else ""

    @property
    def whole_question(self) -> str:
        """The question, after the earlier ones that it refers to."""
        whole = ""
        for message in (*self.history, HumanMessage(self.question)):
            if isinstance(message, HumanMessage):
                asked = str(message.text).strip()
                whole = f"{whole} {asked}".strip() if is_follow_up(asked) else asked
        return whole


def _messages(model_input: LanguageModelInput) -> Sequence[BaseMessage]:
    if isinstance(model_input, str):
        return [HumanMessage(model_input)]
    if isinstance(model_input, PromptValue | Sequence):
        return convert_to_messages(model_input)
    raise TypeError(
        "RetrievalCopyChain takes a question, a list of messages or a prompt value, "
        f"got {type(model_input).__name__}"
    )


def text_of(reply: object) -> str:
    """The text of a model's reply; raises ``TypeError`` if that is neither a message nor text."""
    if isinstance(reply, AIMessage):  # includes AIMessageChunk
        return str(reply.text)
    if isinstance(reply, str):
        return reply
    raise TypeError(
        f"the model must answer with an AIMessage or text, got {type(reply).__name__}: {reply!r:.80}; "
        "parsers belong after RetrievalCopyChain"
    )


class StreamedReply:
    """Collects the pieces of a streamed reply; ``guard`` passes text on until the model repeats itself."""

    def __init__(self, guard: LoopGuard | None = None) -> None:
        self.whole = AIMessageChunk(content="")
        self._guard = guard

    def add(self, piece: object) -> str:
        """Adds the next piece and returns the text that is sure to stay."""
        text = text_of(piece)
        known = piece if isinstance(piece, AIMessage) else AIMessage(text)
        fields = known.model_dump(include={"id", "usage_metadata", "response_metadata"})
        self.whole += AIMessageChunk(content=text, **fields)
        return text if self._guard is None else self._guard.feed(text)

    def end(self) -> str:
        """The text held back so far, after the last piece."""
        return "" if self._guard is None else self._guard.end()
