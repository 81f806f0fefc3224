"""The ways of calling an engine: generate for many prompts and wait, or stream the updates of one row.

Knows rows, and mailboxes for their updates. Does not know how rows are decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from local_backend.engine.worker import LoopMailbox, ThreadMailbox
from local_backend.requests.outputs import Completion, Update
from local_backend.requests.request import References
from local_backend.requests.sampling import SamplingParams
from local_backend.requests.sequence import Row


class Calls(ABC):
    """The callers' interface, built on making, submitting and cancelling rows."""

    @abstractmethod
    def make_row(
        self,
        prompt: Sequence[int],
        listener: Callable[[Update], None],
        *,
        params: SamplingParams | None = None,
        references: Sequence[str] | References | None = None,
        num_context_tokens: int = 0,
    ) -> Row:
        """Check one request and make its row."""

    @abstractmethod
    def submit(self, rows: Sequence[Row]) -> None:
        """Start rows."""

    @abstractmethod
    def cancel(self, rows: Sequence[Row]) -> None:
        """Cancel rows; does nothing for finished ones."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        references: Sequence[Sequence[str] | References | None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt and wait for all of them.

        Args:
            prompts: Token ids of each prompt.
            params: For all prompts, or one for each.
            references: For each prompt, text that may be copied.

        Returns:
            Completions in the order of the prompts.

        Raises:
            ValueError: A prompt is empty or too long, or the lists differ in length; nothing was run then.
            TypeError: A prompt is text, or a single token.
        """
        each_params = params if isinstance(params, Sequence) else [params] * len(prompts)
        each_references = references if references is not None else [None] * len(prompts)
        if not len(prompts) == len(each_params) == len(each_references):
            raise ValueError(
                f"{len(prompts)} prompts, {len(each_params)} params and {len(each_references)} references: "
                "give one of each for every prompt"
            )
        mailboxes = [ThreadMailbox() for _ in prompts]
        rows = [
            self.make_row(prompt, mailbox.put, params=one, references=texts)
            for prompt, mailbox, one, texts in zip(
                prompts, mailboxes, each_params, each_references, strict=True
            )
        ]
        try:
            self.submit(rows)
            return [_completion_of(mailbox) for mailbox in mailboxes]
        finally:
            self.cancel(rows)

    def stream(self, row_of: Callable[[Callable[[Update], None]], Row]) -> Iterator[Update]:
        """Submit one row and yield its updates; closing the iterator early cancels the row.

        Args:
            row_of: Makes the row for a listener; see :meth:`make_row`.

        Raises:
            Exception: The error that ended the row.
        """
        mailbox = ThreadMailbox()
        row = row_of(mailbox.put)
        self.submit([row])
        try:
            while True:
                update = mailbox.get()
                if update.error is not None:
                    raise update.error
                yield update
                if update.is_last:
                    return
        finally:
            self.cancel([row])

    async def astream(self, row_of: Callable[[Callable[[Update], None]], Row]) -> AsyncIterator[Update]:
        """:meth:`stream` in the running event loop."""
        mailbox = LoopMailbox()
        row = row_of(mailbox.put)
        self.submit([row])
        try:
            while True:
                update = await mailbox.get()
                if update.error is not None:
                    raise update.error
                yield update
                if update.is_last:
                    return
        finally:
            self.cancel([row])


def _completion_of(mailbox: ThreadMailbox) -> Completion:
    while True:
        update = mailbox.get()
        if update.error is not None:
            raise update.error
        if update.completion is not None:
            return update.completion
