"""Work for a long run: lines of every kind, for a tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_requests(path: Path, count: int) -> None:
    """Prompts and messages, greedy and sampled, with and without references; some lines are wrong."""
    rng = random.Random(count)
    lines = []
    for number in range(count):
        record: dict[str, object] = {"id": f"row {number}", "max_tokens": rng.choice([1, 3, 8, 20])}
        words = " ".join(
            rng.choice(["bread", "stress", "a plan", "the water"]) for _ in range(rng.randrange(1, 9))
        )
        if number % 3:
            record["prompt"] = words
        else:
            record["messages"] = [{"role": "user", "content": words}]
        if number % 4 == 0:
            record |= {"temperature": 0.8, "top_p": 0.9}
        if number % 5 == 0:
            record["references"] = [words]
        if number % 50 == 17:
            record = {"id": number, "max_tokens": -1, "prompt": words}
        lines.append("" if number % 40 == 9 else json.dumps(record))
    path.write_text("\n".join(lines) + "\n", "utf-8")
