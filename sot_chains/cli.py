"""The commands of ``sot``: ``ask``, ``eval`` and ``serve``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sot_chains.serving.command import add_serve
from sot_chains.serving.loading import LOCAL, Extras, load_model

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_PIPED_WIDTH = 100
_MODELS = (
    "such as openai:gpt-4.1-mini, local:PATH for a folder, GGUF file or hub name that runs here, or "
    "python:PACKAGE.FUNCTION for what a function of yours returns; by default the local default model"
)


def run(arguments: Sequence[str] | None, extras: Extras) -> int:
    """Runs a command.

    Args:
        arguments: The arguments without the program's name; by default those of the process.
        extras: Local models and copying, which other packages add.

    Returns:
        0 on success, 1 if the model call failed (one line on standard error says why), 130 if interrupted.

    Raises:
        SystemExit: With code 2 if the arguments are invalid, with code 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="sot", description="Skeleton-of-Thought: answers written point by point, in parallel."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_ask(commands)
    _add_eval(commands)
    add_serve(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options, extras))
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _add_ask(commands: Any) -> None:
    parser = commands.add_parser(
        "ask",
        help="answer a question plainly and by Skeleton-of-Thought, side by side",
        description="Answers a question plainly and by Skeleton-of-Thought, side by side.",
    )
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--model", metavar="VENDOR:NAME", help=_MODELS)
    parser.add_argument(
        "--base-url", metavar="URL", help="a compatible server, such as http://127.0.0.1:8000/v1"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="the environment variable with the key (OPENAI_API_KEY)"
    )
    parser.add_argument(
        "--plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run plain decoding first, to compare with",
    )
    parser.set_defaults(parser=parser, run=_ask)


def _ask(options: argparse.Namespace, extras: Extras) -> int:
    # Imported here so that "sot --help" does not wait for them.
    from sot_chains.chain import SkeletonOfThought

    if not options.question.strip():
        options.parser.error("the question is empty")
    with contextlib.ExitStack() as opened:
        try:
            model = load_model(
                options.model, extras, opened, base_url=options.base_url, key_name=options.api_key_env
            )
            sot = SkeletonOfThought(model)
        except (ValueError, TypeError) as error:
            options.parser.error(str(error))
        except (OSError, ImportError) as error:
            print(f"sot: {error}", file=sys.stderr)
            return _EXIT_FAILED
        return _compare(sot, options)


def _compare(sot: Any, options: argparse.Namespace) -> int:
    from rich.console import Console

    from sot_chains.display import compare
    from sot_chains.providers import ProviderError

    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else _PIPED_WIDTH
    console = Console(force_terminal=is_terminal, width=width, highlight=False)
    try:
        asyncio.run(compare(sot, options.question, console=console, plain=options.plain))
    except ProviderError as error:
        print(f"sot: {error}", file=sys.stderr)
        return _EXIT_FAILED
    return 0


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="compare plain answers, Skeleton-of-Thought and SoT-R on your questions",
        description="Answers questions plainly and by Skeleton-of-Thought, has a judge compare them and "
        "writes a report. Run it again with the same --out to resume after an interruption.",
    )
    parser.add_argument("questions", type=Path, metavar="FILE", help="JSON lines: question, category")
    parser.add_argument(
        "--model",
        action="append",
        metavar="VENDOR:NAME",
        help=f"{_MODELS}; may be given several times",
    )
    parser.add_argument("--base-url", metavar="URL", help="a compatible server for the models")
    parser.add_argument("--api-key-env", metavar="NAME", help="the environment variable with their key")
    parser.add_argument(
        "--judge", metavar="VENDOR:NAME", help="the model that compares; without it only speed is measured"
    )
    parser.add_argument("--judge-base-url", metavar="URL", help="a compatible server for the judge")
    parser.add_argument("--judge-api-key-env", metavar="NAME", help="the environment variable with its key")
    parser.add_argument(
        "--judge-timeout", type=float, default=120.0, metavar="SECONDS", help="for one judgement (120)"
    )
    parser.add_argument(
        "--judge-concurrency", type=int, default=8, metavar="N", help="judgements at once (8)"
    )
    parser.add_argument("--general-only", action="store_true", help="omit the five aspects")
    parser.add_argument(
        "--router",
        choices=("shipped", "rules", "none"),
        default="shipped",
        help="decides for SoT-R (shipped)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    parser.add_argument(
        "--out", type=Path, default=Path("sot-eval"), metavar="FOLDER", help="for the results (sot-eval)"
    )
    parser.set_defaults(parser=parser, run=_eval)


def _eval(options: argparse.Namespace, extras: Extras) -> int:
    try:
        return asyncio.run(_evaluate(options, extras))
    except (ValueError, TypeError, OSError, ImportError, AttributeError) as error:
        options.parser.error(str(error))
    except KeyboardInterrupt:
        print(f"sot: interrupted; run the same command again to resume from {options.out}", file=sys.stderr)
        return _EXIT_INTERRUPTED


async def _evaluate(options: argparse.Namespace, extras: Extras) -> int:
    # Imported here so that "sot --help" does not wait for them.
    from sot_chains.evaluation import CRITERIA, GENERAL, Judge, Store, evaluate, read_questions, write

    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {options.limit}")
    questions = read_questions(options.questions)[: options.limit]
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(Store(options.out / "store.jsonl"))
        models = {
            name: load_model(name, extras, opened, base_url=options.base_url, key_name=options.api_key_env)
            for name in options.model or [LOCAL]
        }
        judge = None
        if options.judge:
            judge = Judge(
                load_model(
                    options.judge,
                    extras,
                    opened,
                    base_url=options.judge_base_url,
                    key_name=options.judge_api_key_env,
                ),
                store=store,
                label=options.judge,
                timeout_seconds=options.judge_timeout,
                max_concurrency=options.judge_concurrency,
            )
        evaluation = await evaluate(
            questions,
            models,
            store=store,
            router=_router(options.router),
            judge=judge,
            criteria=(GENERAL,) if options.general_only else CRITERIA,
            watch=_progress,
        )
    report = write(evaluation, options.out)
    num_answered = sum(not one.failure for results in evaluation.by_model.values() for one in results)
    print(
        f"{report}: {num_answered} of {len(questions) * len(models)} questions answered every way",
        file=sys.stderr,
    )
    print(json.dumps(evaluation.summary()))
    return 0 if num_answered else _EXIT_FAILED


def _router(name: str) -> Any:
    from sot_chains.router import RulesRouter, auto_router

    if name == "none":
        return None
    return RulesRouter() if name == "rules" else auto_router()


def _progress(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total=total, console=Console(stderr=True), transient=True)
