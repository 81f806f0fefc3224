"""Batches of a chat model that start at once, and their progress bar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list, merge_configs

# A smaller or faster batch shows no bar.
_MIN_ANSWERS, _MIN_SECONDS = 33, 2.0
# Each thread waits for one answer of a batch, so the scheduler chooses among at most this many rows.
_MAX_BATCH_THREADS = 512


class _ProgressBar(BaseCallbackHandler):
    """Advances a bar per answer, from any thread."""

    run_inline = True

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._lock = threading.Lock()

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        with self._lock:
            self._bar.update()

    on_llm_error = on_llm_end


@contextmanager
def _with_progress(
    config: RunnableConfig | list[RunnableConfig] | None, num_inputs: int, *, shown: bool
) -> Iterator[list[RunnableConfig]]:
    """The configuration of each input, with a progress bar if the batch is long."""
    configs = get_config_list(config, num_inputs)
    if not shown or num_inputs < _MIN_ANSWERS:
        yield configs
        return
    from tqdm.auto import tqdm

    with tqdm(total=num_inputs, unit="answer", delay=_MIN_SECONDS, disable=None) as bar:
        progress: RunnableConfig = {"callbacks": [_ProgressBar(bar)]}
        yield [merge_configs(each, progress) for each in configs]


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
        with _with_progress(config, len(inputs), shown=self.progress) as configs:
            # LangChain takes the number of threads from the first configuration.
            if configs and configs[0].get("max_concurrency") is None:
                most = max(_MAX_BATCH_THREADS, 4 * self._num_rows)
                configs[0] = {**configs[0], "max_concurrency": min(len(inputs), most)}
            return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """:meth:`batch` in the running event loop."""
        with _with_progress(config, len(inputs), shown=self.progress) as configs:
            return await super().abatch(inputs, configs, return_exceptions=return_exceptions, **kwargs)
