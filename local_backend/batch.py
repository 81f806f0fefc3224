"""Offline generation of a large file: ``python -m local_backend.batch IN.jsonl OUT.jsonl``.

A line of the input holds "messages" (answered), "prompt" (text, continued as it is) or "prompt_ids", and
optionally "id", "references", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
"frequency_penalty", "seed" and "stop". The output has one line for each, in the same order: "line", its
number in the input; "id"; "text", "finish_reason", "num_prompt_tokens" and "num_tokens", or "error" if it
could not be answered. It is written when all lines are answered; after a kill the same command resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from local_backend.scheduling.waiting_queue import AdmissionPolicy

if TYPE_CHECKING:
    from local_backend.offline.batch import Report


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a mistake of the user ends it with a message and status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        report = _run(given)
    except (ValueError, OSError, ImportError, sqlite3.Error) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped; the same command resumes the run\n")
    print(report, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m local_backend.batch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="IN.jsonl", help="requests, one a line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="answers, one a line")
    parser.add_argument(
        "--model", help="folder, GGUF file or hub name of a causal LM; the default model if not given"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the weights; in float32 a line's answer does not depend on those beside it (%(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="maximum of an answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="each line derives its own (%(default)s)")
    parser.add_argument("--drafter", default="autoregressive", help='e.g. "combined" (%(default)s)')
    parser.add_argument(
        "--scheduling",
        choices=get_args(AdmissionPolicy),
        default="longest_first",
        help="order of admission (%(default)s)",
    )
    parser.add_argument("--max-cache-mib", type=float, help="memory for keys and values")
    parser.add_argument("--max-rows", type=int, default=64, help="rows in a forward (%(default)s)")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def _run(given: argparse.Namespace) -> Report:
    if not given.source.exists():
        raise FileNotFoundError(f"{given.source} does not exist: give a file of JSON lines")
    if given.output.exists() and given.output.samefile(given.source):
        raise ValueError(f"{given.output} is the input: name another output")
    from tqdm.auto import tqdm

    from local_backend.engine.engine import Engine
    from local_backend.models.loading import load
    from local_backend.offline.batch import OfflineRun
    from local_backend.offline.jsonl import read_lines
    from local_backend.offline.ordered_output import OrderedOutput
    from local_backend.scheduling.lengths import Scheduling
    from local_backend.sequences.sampling import SamplingParams

    defaults = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature)
    max_cache_bytes = None if given.max_cache_mib is None else int(given.max_cache_mib * 2**20)
    scheduling = Scheduling(given.scheduling, max_cache_bytes=max_cache_bytes)
    settings = {
        name: getattr(given, name) for name in ("model", "dtype", "max_tokens", "temperature", "seed")
    }
    with given.source.open("rb") as file:
        settings["input"] = hashlib.file_digest(file, "sha256").hexdigest()
    with OrderedOutput(given.output, settings) as output:
        model, tokenizer = load(given.model, dtype=given.dtype)
        num_lines = sum(1 for _ in read_lines(given.source))
        with (
            Engine(
                model,
                tokenizer,
                given.drafter,
                max_rows=given.max_rows,
                scheduling=scheduling,
            ) as engine,
            tqdm(
                total=num_lines, initial=output.num_done, unit="row", disable=given.no_progress or None
            ) as bar,
        ):
            run = OfflineRun(
                engine,
                given.source,
                output,
                defaults=defaults,
                seed=given.seed,
                max_in_flight=4 * given.max_rows,
            )
            return run(lambda num_done: bar.update(num_done - bar.n))


if __name__ == "__main__":
    main()
