"""The progress bar of a long batch, and the model that advances it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig

# A smaller or faster batch shows no bar.
_MIN_ANSWERS, _MIN_SECONDS = 33, 2.0


@contextmanager
def batch_progress(num_answers: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Shows a progress bar; yields the function to call for each answer, from any thread.

    Args:
        num_answers: Their total number.
        shown: Whether a bar may be shown: in a notebook, or on standard error if that is a terminal.
    """
    if not shown or num_answers < _MIN_ANSWERS:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    lock = threading.Lock()
    with tqdm(total=num_answers, unit="answer", delay=_MIN_SECONDS, disable=None) as bar:

        def count() -> None:
            with lock:
                bar.update()

        yield count


class CountedAnswers(Runnable[LanguageModelInput, AIMessage]):
    """Advances the progress bar per answer, without adding a trace run."""

    def __init__(self, model: BaseChatModel, count: Callable[[], None]) -> None:
        self._model = model
        self._count = count

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """The model's own."""
        try:
            return self._model.invoke(input, config, **kwargs)
        finally:
            self._count()

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """The model's own."""
        try:
            return await self._model.ainvoke(input, config, **kwargs)
        finally:
            self._count()
