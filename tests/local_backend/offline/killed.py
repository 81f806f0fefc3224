"""A program that runs offline generation in child processes and kills them: ``killed.py FOLDER ROWS KILLS``.

It forks before torch has started a thread, so that children need not load everything again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path


def main(folder: Path, num_rows: int, num_kills: int) -> None:
    import torch

    from local_backend import Engine, SamplingParams
    from local_backend.offline.batch import answer_lines
    from local_backend.offline.jsonl import ResumableOutput, read_lines
    from local_backend.scheduling.lengths import Scheduling
    from tests.local_backend.offline.work import write_requests
    from tests.tiny import random_llama, tiny_tokenizer

    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer()
    model = random_llama(num_hidden_layers=2)
    source = folder / "in.jsonl"
    write_requests(source, num_rows)

    def run(path: Path) -> None:
        scheduling = Scheduling("longest_first", max_cache_bytes=2**18)
        with (
            ResumableOutput(path, {}) as output,
            Engine(model, tokenizer, "reference_copy", max_rows=8, scheduling=scheduling) as engine,
        ):
            lines = (line for line in read_lines(source) if line not in output)
            for _, record in answer_lines(engine, lines, SamplingParams(max_tokens=9), max_in_flight=32):
                output.add(record)
            output.finish()

    def child(path: Path) -> int:
        process = os.fork()
        if process == 0:
            run(path)
            os._exit(0)
        return process

    started = time.monotonic()
    assert os.waitpid(child(folder / "undisturbed.jsonl"), 0)[1] == 0
    seconds = time.monotonic() - started
    rng = random.Random()
    for _ in range(num_kills):
        process = child(folder / "killed.jsonl")
        time.sleep(rng.uniform(0.02, 0.15) * seconds)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        if not (folder / "killed.jsonl.partial").exists():  # it was faster than the undisturbed one, and done
            (folder / "killed.jsonl").unlink()
        with ResumableOutput(folder / "killed.jsonl", {}) as output:
            print("killed at", output.num_done, "lines", flush=True)
    assert os.waitpid(child(folder / "killed.jsonl"), 0)[1] == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
