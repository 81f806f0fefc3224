"""Batches of a chat model that start at once, and their progress bar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config

# A smaller or faster batch shows no bar.
_MIN_ANSWERS, _MIN_SECONDS = 33, 2.0
# Each thread waits for one answer of a batch, so the scheduler chooses among at most this many rows.
_MAX_BATCH_THREADS = 512


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


class BatchedChatModel(BaseChatModel):
    """A chat model that takes all inputs of a batch at once.

    Attributes:
        progress: Whether ``batch`` and ``abatch`` show a progress bar when they take long.
    """

    progress: bool = True

    @property
    def _num_rows(self) -> int:
        """How many answers the model writes at a time."""
        raise NotImplementedError  # a pydantic model has no abstract properties; subclasses say it

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer all inputs at once; results in the order of the inputs.

        The engine's scheduler orders them. LangChain's own ``batch`` would run only a few at a time.
        """
        if inputs:
            # LangChain takes the number of threads from the first configuration.
            configs = list(config) if isinstance(config, Sequence) else [ensure_config(config)]
            if configs and configs[0].get("max_concurrency") is None:
                most = max(_MAX_BATCH_THREADS, 4 * self._num_rows)
                configs[0] = {**configs[0], "max_concurrency": min(len(inputs), most)}
            config = configs if isinstance(config, Sequence) else configs[0]
        with batch_progress(len(inputs), shown=self.progress) as count:
            counted = CountedAnswers(self, count)
            return counted.batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """:meth:`batch` in the running event loop."""
        with batch_progress(len(inputs), shown=self.progress) as count:
            counted = CountedAnswers(self, count)
            return await counted.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
