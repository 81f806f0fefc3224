"""A conversation in the terminal: questions in, streamed answers with numbered footnotes out.

Knows lines and the terminal. Does not know where the chain and its documents come from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, cast

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import Runnable
from rich.console import Console
from rich.live import Live
from rich.text import Text

from retrieval_copy.display import CitedAnswer, CitedPassage, citations_of

if TYPE_CHECKING:
    from collections.abc import Generator

HELP = "a question, or a footnote's number to see its passage; q leaves, Ctrl-C stops an answer"
_PROMPT = "> "
_LEAVE = frozenset({"q", "quit", "exit"})
_MAX_TURNS = 3  # earlier turns that the model sees


class Session:
    """Answers questions one after the other; each may refer to the ones before.

    Args:
        chain: Made by :func:`~retrieval_copy.retrieval_chain`.
        console: Shows everything. On a terminal answers appear while they are written.
        arguments: Arguments of every call of the chain.
        remembers: Whether the model sees earlier turns. A tiny model answers those again.
    """

    def __init__(
        self,
        chain: Runnable[dict[str, Any], dict[str, Any]],
        console: Console,
        arguments: dict[str, Any] | None = None,
        *,
        remembers: bool = True,
    ) -> None:
        self._remembers = remembers
        self._chain = chain
        self._console = console
        self._arguments = arguments or {}
        self._turns: list[BaseMessage] = []
        self._answer: AIMessage | None = None
        self._context: list[Document] = []

    def run(self, read: Callable[[], str]) -> None:
        """Reads lines and answers them until the user leaves.

        Args:
            read: Returns the next line; raises ``EOFError`` after the last one.
        """
        while True:
            try:
                line = read().strip()
            except EOFError:
                if self._console.is_terminal:
                    self._console.print()  # Ctrl-D leaves the cursor behind the prompt
                return
            except KeyboardInterrupt:
                self._console.print("(q leaves)", style="dim")
                continue
            if line.lower() in _LEAVE:
                return
            self.take(line)

    def take(self, line: str) -> None:
        """Acts on one line: a question, the number of a footnote, or ``?``."""
        if line.strip("[]").isdecimal():
            self._show_passage(int(line.strip("[]")))
        elif line in ("?", "help"):
            self._console.print(HELP, style="dim", markup=False)
        elif line:
            try:
                self.ask(line)
            except (RuntimeError, ValueError) as error:  # the next question may fare better
                self._console.print(f"{type(error).__name__}: {error}", style="red", markup=False)

    def ask(self, question: str) -> None:
        """Answers ``question``; Ctrl-C ends the answer and leaves it out of the conversation."""
        given = {"input": question, "chat_history": self._turns[-2 * _MAX_TURNS :] if self._remembers else []}
        parts = self._chain.stream(given, **self._arguments)
        answer: AIMessage | None = None
        self._context = []
        text = ""
        # While it is written the text is replaced again and again, where there is a terminal that can do so.
        live = Live(Text("…", "dim"), console=self._console, transient=True)
        try:
            with closing(cast("Generator[dict[str, Any], None, None]", parts)), live:
                for part in parts:
                    self._context = part.get("context", self._context)
                    text += part.get("answer", "")
                    answer = part.get("message", answer)
                    live.update(Text(text))
        except KeyboardInterrupt:
            live.stop()  # it still runs if it was interrupted in its beginning
            self._answer = None
            self._console.print(Text.assemble(text, ("\n(stopped)" if text else "(stopped)", "dim")))
            return
        self._answer = answer
        if answer is None:
            return
        self._console.print(CitedAnswer(answer))
        if answer.response_metadata["retrieval"].get("supported") is False:
            self._console.print("the passages do not support this answer", style="yellow")
        if decoding := answer.response_metadata.get("decoding"):
            forwards, tokens = decoding["num_forwards"], decoding["tokens_per_forward"]
            self._console.print(f"{forwards} forwards, {tokens:.1f} tokens each", style="dim")
        self._turns += [HumanMessage(question), AIMessage(text)]

    def _show_passage(self, number: int) -> None:
        citations = citations_of(self._answer) if self._answer else []
        if not 1 <= number <= len(citations):
            said = f"the last answer has {len(citations)}" if citations else "the last answer has none"
            self._console.print(f"no footnote [{number}]: {said}", style="dim", markup=False)
            return
        citation = citations[number - 1]
        self._console.print(CitedPassage(self._context[citation["document"]], citation))


def lines_of(console: Console) -> Callable[[], str]:
    """Reads lines from the standard input: with a prompt and a history from a person, plainly from a pipe."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # on Windows
            import readline  # noqa: F401 - gives input() a history and editing
        return lambda: input(_PROMPT)
    lines: Iterator[str] = iter(sys.stdin)

    def read() -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        console.print(f"{_PROMPT}{line.strip()}", markup=False)
        return line

    return read
