"""A chat model on vLLM that starts shorter answers first: the predicted length is the request's priority.

::

    vllm serve MODEL --scheduling-policy priority
    chat = LengthPriority(model=ChatOpenAI(base_url=..., model=...), tokens_per_second=40)

vLLM starts the request with the lowest priority number. Here that number is a deadline: the time of arrival
plus a multiple of the time that the answer is predicted to take alone. So short requests cannot overtake a
long one for ever, and clients need to agree on nothing but the clock.

Knows the text of a request. Does not know which others wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from local_backend.drafting.drafter import require_at_least
from local_backend.scheduling.lengths import LearningPredictor, LengthPredictor, ObservedLengths
from local_backend.sequences.sampling import SamplingParams


def _utf8(text: str) -> Sequence[int]:
    return list(text.encode("utf-8", "replace"))


class LengthPriority(RunnableLambda[LanguageModelInput, AIMessage]):
    """Sends every request to ``model`` with a priority that follows from its predicted length.

    Args:
        model: A chat model whose calls take ``extra_body``, as ``ChatOpenAI``.
        predictor: Predicts from the prompt; one that learns is told of every complete answer.
        encode: The token ids that the predictor reads; it learns from bytes as well as from tokens.
        tokens_per_second: How fast the server writes one answer.
        stretch: The deadline's multiple of the time alone; 0 is first come, more favours short answers.
        unknown_tokens: The length assumed without a prediction.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        model: Runnable[LanguageModelInput, Any],
        *,
        predictor: LengthPredictor | None = None,
        encode: Callable[[str], Sequence[int]] = _utf8,
        tokens_per_second: float = 40.0,
        stretch: float = 16.0,
        unknown_tokens: float = 256.0,
    ) -> None:
        require_at_least(1e-6, tokens_per_second=tokens_per_second)
        require_at_least(0, stretch=stretch, unknown_tokens=unknown_tokens)
        self.model, self.predictor, self.encode = model, predictor or ObservedLengths(), encode
        self.tokens_per_second, self.stretch = tokens_per_second, stretch
        self.unknown_tokens = unknown_tokens
        super().__init__(self._prioritized)

    def priority(self, input: LanguageModelInput, *, max_tokens: int | None = None) -> int:
        """The deadline of a request that arrives now, in milliseconds."""
        params = [SamplingParams(max_tokens=max_tokens)] if max_tokens else None
        prediction = self.predictor.predict([self.encode(_input_text(input))], params)[0]
        num_tokens = prediction.num_tokens if prediction else self.unknown_tokens
        seconds_alone = min(num_tokens, max_tokens or num_tokens) / self.tokens_per_second
        return round(1000 * (time.time() + self.stretch * seconds_alone))

    def _prioritized(self, input: LanguageModelInput, **given: Any) -> Runnable[Any, AIMessage]:
        """The model with the priority of ``input``, for LangChain to call; its answer is learned from."""
        max_tokens = given.get("max_tokens") or getattr(self.model, "max_tokens", None)
        priority = self.priority(input, max_tokens=max_tokens)
        own = getattr(self.model, "extra_body", None) or {}  # what a call gives replaces it
        body = {"priority": priority, **own, **(given.get("extra_body") or {})}
        learn = RunnablePassthrough[AIMessage](partial(self._learn, input))  # passes streams on as they come
        return self.model.bind(**{**given, "extra_body": body}) | learn

    def _learn(self, input: LanguageModelInput, message: AIMessage) -> None:
        reason = message.response_metadata.get("finish_reason")
        if message.usage_metadata and reason == "stop" and isinstance(self.predictor, LearningPredictor):
            self.predictor.observe(self.encode(_input_text(input)), message.usage_metadata["output_tokens"])


def _input_text(input: LanguageModelInput) -> str:
    """The messages' texts and roles, from the first on: prompts of one template begin alike."""
    if isinstance(input, str):
        return f"human: {input}"
    messages: Sequence[BaseMessage] = (
        input.to_messages() if isinstance(input, PromptValue) else convert_to_messages(input)
    )
    return "\n".join(f"{message.type}: {message.text}" for message in messages)
