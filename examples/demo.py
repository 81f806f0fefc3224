"""A question answered plainly and point by point, side by side, on the model that ships with the package.

Run ``make demo`` or ``python examples/demo.py "A question"``. Needs no key, no GPU and no download.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from rich.console import Console
from transformers.utils import logging

from local_backend import ChatLocal
from local_backend.embedded import closest_topic, known_topics
from sot_chains.display import compare

DEFAULT_QUESTION = "How can I manage my money better and save more?"
PIPED_WIDTH = 100


def warning_for(question: str) -> str | None:
    """What to say first about a question the small model was never taught about."""
    if closest_topic(question) is not None:
        return None
    titles = [topic.title.lower() for topic in known_topics()[::6]]
    return (
        "the embedded model is tiny and was not taught about this; expect an answer to another question. "
        f"It knows {len(known_topics())} topics, for example {', '.join(titles[:-1])} and {titles[-1]}."
    )


def main(arguments: Sequence[str]) -> int:
    question = " ".join(arguments).strip() or DEFAULT_QUESTION
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=PIPED_WIDTH, highlight=False)
    logging.disable_progress_bar()  # 12 MB load at once
    with ChatLocal.embedded() as chat:
        chat.invoke("Hello", max_tokens=2)  # the first forward is slow; it should not count against either
        stats = chat.engine.stats
        asyncio.run(
            compare(
                chat,
                question,
                console=console,
                forwards=lambda: stats.num_forwards + stats.num_prefill_forwards,
                warning=warning_for(question),
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
