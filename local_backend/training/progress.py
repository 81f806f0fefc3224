"""One progress bar, on standard error. Knows nothing of what progresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress_bar(progress: Progress | None = None) -> Iterator[Progress]:
    """The bar given, or a new one that is shown until the end of the block."""
    if progress is not None:
        yield progress
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar


@contextmanager
def without_bars_of_datasets() -> Iterator[None]:
    """Reading and writing parts takes a moment each and needs no bar."""
    import datasets

    were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()
