"""A log of prompts and answer lengths as JSON lines, written as answers end; a predictor is trained on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from local_backend.sequences.sampling import SamplingParams


class LengthLog:
    """Appends one line for each answer, with ``prompt_ids`` and ``num_tokens``; thread-safe.

    Args:
        path: The file; created if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()

    def add(
        self, prompt_ids: Sequence[int], num_tokens: int, params: SamplingParams | None = None, **more: Any
    ) -> None:
        """Write one line.

        Args:
            prompt_ids: Token ids of the prompt.
            num_tokens: Tokens of the answer. Do not log cancelled answers: their full length is unknown.
            params: How it was sampled; temperature and ``max_tokens`` are logged.
            more: Further JSON values to log, e.g. the kind of request.
        """
        record: dict[str, Any] = {"prompt_ids": list(prompt_ids), "num_tokens": num_tokens, **more}
        if params is not None:
            record |= {"temperature": params.temperature, "max_tokens": params.max_tokens}
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
