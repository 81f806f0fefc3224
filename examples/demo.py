"""A question answered plainly and point by point, side by side.

Run ``make demo`` or ``python examples/demo.py "A question"``. Needs no key and no GPU. The model is the
default one, or the folder, GGUF file or hub name in the environment variable ``MODEL``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from rich.console import Console
from transformers.utils import logging

from local_backend import ChatLocal
from sot_chains import SkeletonOfThought
from sot_chains.display import compare

DEFAULT_QUESTION = "How can I manage my money better and save more?"
PIPED_WIDTH = 100
MAX_TOKENS = 512  # of a reply: a small model may repeat itself without end


def main(arguments: Sequence[str]) -> int:
    logging.disable_progress_bar()
    if isinstance(sys.stdout, TextIOWrapper):  # of any encoding
        sys.stdout.reconfigure(errors="replace")
    model = os.environ.get("MODEL") or None
    try:
        with ChatLocal.from_pretrained(model, max_tokens=MAX_TOKENS) as chat:
            show(chat, " ".join(arguments).strip() or DEFAULT_QUESTION)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    if model is None:
        print("The default model is tiny and often wrong. Name one that you would use: make demo MODEL=...")
    return 0


def show(chat: ChatLocal, question: str) -> None:
    """Print both answers with their times."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=PIPED_WIDTH, highlight=False)
    # What a process does once, such as reading the examples of points, should not count against either.
    SkeletonOfThought(chat, router="always").invoke("What is good about bread?", max_tokens=16)
    asyncio.run(compare(chat, question, console=console))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
