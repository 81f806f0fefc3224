"""Command line of the tasks: ``python -m benchmarks.jacobi_tasks``.

``train NAME`` trains a plain model and a smaller draft model for comparison, and tunes the plain model for
consistency. ``score NAME`` prints the share of held-out cases that a model answers correctly.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from benchmarks.jacobi_tasks import TASKS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jacobi_tasks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the models of a task")
    score = commands.add_parser("score", help="score a model on held-out cases")
    show = commands.add_parser("show", help="print cases")
    for command in (train, score, show):
        command.add_argument("task", choices=sorted(TASKS))
    train.add_argument("--output", type=Path, help="folder of the models (build/tasks/NAME)")
    train.add_argument(
        "--stages",
        nargs="+",
        choices=("plain", "draft", "tuned"),
        default=("plain", "draft", "tuned"),
        help="run only these stages; the others need plain",
    )
    score.add_argument("--model", type=Path, required=True, help="folder of the model")
    score.add_argument("--cases", type=int, default=200, help="held-out cases (%(default)s)")
    show.add_argument("--cases", type=int, default=3, help="number of cases (%(default)s)")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    task = TASKS[given.task]
    if given.command == "show":
        from benchmarks.jacobi_tasks.base import draw_cases

        for case in islice(draw_cases(task, "test"), given.cases):
            print(f"{case.prompt}{case.answer}\n")
        return
    from benchmarks.jacobi_tasks.recipes import score_model, train_task

    try:
        if given.command == "train":
            train_task(task, given.output or Path("build/tasks") / task.name, stages=given.stages)
        else:
            print(json.dumps({"quality": score_model(task, given.model, given.cases)}))
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog} {given.command}: {error}\n")


if __name__ == "__main__":
    main()
