"""Offline generation of a large file: ``python -m local_backend.batch IN.jsonl OUT.jsonl``.

A line of the input has "messages" or a "question" (answered), a "prompt" (text, continued as it is) or
"prompt_ids", and optionally "id", "references", "max_tokens", "temperature", "top_p", "top_k", "min_p",
"presence_penalty", "frequency_penalty", "seed" and "stop". The output has one line for each, in the same
order: "line", its number in the input; "id"; "text", "finish_reason", "num_prompt_tokens" and "num_tokens",
or "error" if it could not be answered. It is written when all lines are answered; after a kill the same
command resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from local_backend.scheduling.lengths import AdmissionPolicy

if TYPE_CHECKING:
    from local_backend.engine.engine import Engine


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a mistake of the user ends it with a message and status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        report = _run(given)
    except (ValueError, OSError, ImportError) as error:
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
    add = parser.add_argument
    add("source", type=Path, metavar="IN.jsonl", help="requests, one a line")
    add("output", type=Path, metavar="OUT.jsonl", help="answers, one a line")
    add("--model", help="folder, GGUF file or hub name of a causal LM; the default model if not given")
    about = "of the weights; in float32 a line's answer does not depend on those beside it (%(default)s)"
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help=about)
    add("--device", default="auto", help='e.g. "cpu"; by default a GPU if there is one')
    add("--max-tokens", type=int, default=1024, help="maximum of an answer (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    add("--seed", type=int, default=0, help="each line derives its own (%(default)s)")
    add("--drafter", default="autoregressive", help='e.g. "combined" (%(default)s)')
    policies = get_args(AdmissionPolicy)
    add("--scheduling", choices=policies, default="longest_first", help="order of admission (%(default)s)")
    add("--max-cache-mib", type=float, help="memory for keys and values")
    add("--max-rows", type=int, default=64, help="rows in a forward (%(default)s)")
    add("--no-progress", action="store_true", help="show no progress bar")
    return parser


def _run(given: argparse.Namespace) -> str:
    """Answer the lines that are not answered yet; returns a report without those of earlier runs."""
    given.source, given.output = given.source.expanduser(), given.output.expanduser()
    if not given.source.exists():
        raise FileNotFoundError(f"{given.source} does not exist: give a file of JSON lines")
    if given.output.exists() and given.output.samefile(given.source):
        raise ValueError(f"{given.output} is the input: name another output")
    from local_backend.models.files import find_model

    if given.model is not None:
        find_model(given.model)
    from tqdm.auto import tqdm

    from local_backend.offline.batch import answer_lines
    from local_backend.offline.jsonl import ResumableOutput, read_lines
    from local_backend.sequences.sampling import SamplingParams

    defaults = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature)
    settings = {
        name: getattr(given, name) for name in ("model", "dtype", "max_tokens", "temperature", "seed")
    }
    with given.source.open("rb") as file:
        settings["input"] = hashlib.file_digest(file, "sha256").hexdigest()
    with (
        ResumableOutput(given.output, settings) as output,
        _make_engine(given) as engine,
        tqdm(
            total=sum(1 for _ in read_lines(given.source)),
            initial=output.num_done,
            unit="row",
            disable=given.no_progress or None,
        ) as bar,
    ):
        started = time.perf_counter()
        num_answered = num_errors = 0
        remaining = (line for line in read_lines(given.source) if line not in output)
        for _, record in answer_lines(
            engine, remaining, defaults, seed=given.seed, max_in_flight=4 * given.max_rows
        ):
            output.add(record)
            bar.update()
            num_answered += "error" not in record
            num_errors += "error" in record
        output.finish()
        return _report(engine, num_answered, num_errors, time.perf_counter() - started)


def _make_engine(given: argparse.Namespace) -> Engine:
    from local_backend.engine.engine import Engine
    from local_backend.models.loading import load
    from local_backend.scheduling.lengths import Scheduling

    max_cache_bytes = None if given.max_cache_mib is None else int(given.max_cache_mib * 2**20)
    scheduling = Scheduling(given.scheduling, max_cache_bytes=max_cache_bytes)
    model, tokenizer = load(given.model, dtype=given.dtype, device=given.device)
    return Engine(model, tokenizer, given.drafter, max_rows=given.max_rows, scheduling=scheduling)


def _report(engine: Engine, num_answered: int, num_errors: int, seconds: float) -> str:
    stats = engine.stats
    padding = stats.num_padding / stats.num_positions if stats.num_positions else 0.0
    filled = stats.num_row_forwards / max(1, stats.num_forwards * engine.max_rows)
    errors = f", {num_errors} of them not answered" if num_errors else ""
    return (
        f"{num_answered + num_errors} rows{errors} in {seconds:.1f} s: {num_answered / seconds:.2f} rows/s, "
        f"{stats.num_tokens / seconds:.1f} tokens/s, {padding:.1%} padding, {filled:.1%} of slots filled"
    )


if __name__ == "__main__":
    main()
