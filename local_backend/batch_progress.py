"""The bar of a long batch. Knows how many answers there will be. Does not know of what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A batch that is smaller, or done sooner, shows nothing.
_MIN_ANSWERS, _MIN_SECONDS = 33, 2.0


@contextmanager
def batch_progress(num_answers: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Yields what to call for each answer, from any thread.

    Args:
        num_answers: In all.
        shown: Whether a bar may be shown: in a notebook, or on standard error where that is a terminal.
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
