"""vLLM as a peer: a process in vLLM's own environment, which answers batches of prompts one after another.

``VllmProcess`` is this project's side. ``python -m benchmarks.vllm_worker SETTINGS`` is the process: it reads
a batch as a line of JSON and writes token ids and times as another. Its suffix decoding remembers no earlier
answers, since a prompt that is answered again would be copied whole.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peer_process import PeerProcess
from benchmarks.peers_vllm import METHODS as SPECULATIVE

if TYPE_CHECKING:
    import torch

    from benchmarks.peers import Run, Task

ROOT = Path(__file__).parents[1]
METHODS: dict[str, dict[str, Any]] = {
    "vLLM greedy": SPECULATIVE["none"],
    "vLLM ngram": SPECULATIVE["ngram"],
    "vLLM suffix": {**SPECULATIVE["suffix"], "suffix_decoding_max_cached_requests": 0},
}
"""``speculative_config`` of each method."""
_CACHE_GIB = 1


class VllmProcess:
    """A running process, which is a way to decode: tasks in, a :class:`~benchmarks.peers.Run` out.

    It starts in the background: several can start at once, each first batch waits until its own is ready.

    Args:
        python: Of vLLM's environment.
        model: Folder as ``transformers`` saves it.
        method: One of :data:`METHODS`.
        dtype: Of the weights.
        num_threads: Of every forward.
        num_rows: Answers at a time.
        num_positions: Of a prompt and its answer.
        settings: Further arguments of ``vllm.LLM``.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        method: str,
        *,
        dtype: str,
        num_threads: int,
        num_rows: int,
        num_positions: int,
        **settings: Any,
    ) -> None:
        settings = {
            "model": str(model),
            "dtype": dtype,
            "enforce_eager": True,
            "max_model_len": num_positions,
            "max_num_seqs": num_rows,
            "enable_prefix_caching": False,
            "speculative_config": METHODS[method] or None,
            **settings,
        }
        self.process = PeerProcess(
            [str(python), "-m", "benchmarks.vllm_worker", json.dumps(settings)],
            {
                "PYTHONPATH": str(ROOT),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
            replies=True,
        )

    def __call__(self, tasks: Sequence[Task]) -> Run:
        """Answer all tasks at once.

        Raises:
            RuntimeError: The process ended; the message ends with what it wrote.
        """
        from benchmarks.peers import Run

        batch = {
            "prompts": [task.prompt for task in tasks],
            "max_tokens": [task.num_tokens for task in tasks],
        }
        answer = json.loads(self.process.ask(json.dumps(batch)))
        return Run(
            tuple(map(tuple, answer["token_ids"])),
            answer["seconds"],
            answer["decode_seconds"],
            sum(map(len, answer["token_ids"])) - answer["num_first"],
            answer["num_forwards"],
        )


def folder_of(model_name: str | None, dtype: torch.dtype) -> Path:
    """The model as a folder, or its name on the hub, for peers that read no GGUF file.

    Raises:
        OSError: A GGUF file cannot be saved in another form.
    """
    from local_backend.models.default_model import default_model_folder
    from local_backend.models.gguf import converted

    if model_name is None:
        return default_model_folder(dtype)
    found = converted(Path(model_name), dtype) if Path(model_name).is_file() else Path(model_name)
    if not isinstance(found, Path):
        raise OSError(f"{model_name} cannot be saved in the cache directory; the log says why")
    return found


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no reply
    from vllm import LLM

    engine = LLM(**json.loads(sys.argv[1])).llm_engine
    for number, line in enumerate(sys.stdin):
        batch = json.loads(line)
        print(json.dumps(_answer(engine, f"{number}", **batch)), file=replies, flush=True)


def _answer(engine: Any, name: str, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
    """Token ids of all answers and the times that a :class:`~benchmarks.peers.Run` has."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    started = time.perf_counter()
    for number, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=limit, output_kind=RequestOutputKind.DELTA)
        engine.add_request(f"{name} {number}", {"prompt_token_ids": prompt}, params)
    answers: list[list[int]] = [[] for _ in prompts]
    first_at, num_first, num_forwards = started, 0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer, added = answers[int(output.request_id.split()[-1])], output.outputs[0].token_ids
            num_forwards += bool(added)
            if added and not answer:
                first_at, num_first = time.perf_counter(), num_first + len(added)
            answer.extend(added)
    ended = time.perf_counter()
    return {
        "token_ids": answers,
        "seconds": ended - started,
        "decode_seconds": ended - first_at,
        "num_first": num_first,
        "num_forwards": num_forwards,
    }


if __name__ == "__main__":
    main()
