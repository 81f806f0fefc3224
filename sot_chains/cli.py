"""The console command ``sot``: ``ask``, ``eval`` and ``serve``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable

from sot_chains.serving.command import add_serve

if TYPE_CHECKING:
    from sot_chains.chain import SkeletonOfThought


_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_PIPED_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The arguments without the program's name; by default those of the process.

    Returns:
        0 on success, 1 if the model call failed (one line on standard error says why), 130 if interrupted.

    Raises:
        SystemExit: With code 2 if the arguments are invalid, with code 0 after ``--help``.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    return int(options.run(options, options.parser))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sot", description="Skeleton-of-Thought: answers written point by point, in parallel."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ask = commands.add_parser(
        "ask",
        help="answer a question plainly and by Skeleton-of-Thought, side by side",
        description="Answers a question plainly and by Skeleton-of-Thought, side by side.",
    )
    ask.add_argument("question", metavar="QUESTION")
    ask.add_argument("--model", metavar="VENDOR:NAME", help=MODELS)
    ask.add_argument(
        "--base-url", metavar="URL", help="a compatible server, such as http://127.0.0.1:8000/v1"
    )
    ask.add_argument(
        "--api-key-env", metavar="NAME", help="the environment variable with the key (OPENAI_API_KEY)"
    )
    ask.add_argument(
        "--plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run plain decoding first, to compare with",
    )
    ask.set_defaults(parser=ask, run=_ask)
    _add_eval(commands)
    add_serve(commands, model_of)
    return parser


def _ask(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # Imported here so that "sot --help" does not wait for them.
    from sot_chains.chain import SkeletonOfThought

    if not options.question.strip():
        parser.error("the question is empty")
    with contextlib.ExitStack() as opened:
        try:
            model = model_of(options.model, opened, base_url=options.base_url, key_name=options.api_key_env)
            sot = SkeletonOfThought(model)
        except (ValueError, TypeError) as error:
            parser.error(str(error))
        except (OSError, ImportError) as error:
            print(f"sot: {error}", file=sys.stderr)
            return _EXIT_FAILED
        return _compare(sot, options)


def _compare(sot: SkeletonOfThought, options: argparse.Namespace) -> int:
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
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


_PYTHON, _LOCAL = "python:", "local:"
MODELS = (
    "such as openai:gpt-4.1-mini, local:PATH for a folder, GGUF file or hub name that runs here, or "
    "python:PACKAGE.FUNCTION for what a function of yours returns; by default the local default model"
)
ROUTERS = ("shipped", "rules", "none")


def _add_eval(commands: Any) -> None:
    """Adds ``eval`` to the commands of ``sot``."""
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
        help=f"{MODELS}; may be given several times",
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
    parser.add_argument("--router", choices=ROUTERS, default="shipped", help="decides for SoT-R (shipped)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    parser.add_argument(
        "--out", type=Path, default=Path("sot-eval"), metavar="FOLDER", help="for the results (sot-eval)"
    )
    parser.set_defaults(parser=parser, run=_eval)


def _eval(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        return asyncio.run(_evaluate(options))
    except (ValueError, TypeError, OSError, ImportError, AttributeError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"sot: interrupted; run the same command again to resume from {options.out}", file=sys.stderr)
        return _EXIT_INTERRUPTED


async def _evaluate(options: argparse.Namespace) -> int:
    # Imported here so that "sot --help" does not wait for them.
    from sot_chains.evaluation import GENERAL, Judge, evaluate, read_questions, write
    from sot_chains.evaluation.data import Store
    from sot_chains.evaluation.judge import CRITERIA

    if find_spec("matplotlib") is None:
        raise ValueError("the report's figures need matplotlib: pip install matplotlib")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {options.limit}")
    questions = read_questions(options.questions)[: options.limit]
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(Store(options.out / "store.sqlite"))
        models = {
            name: model_of(name, opened, base_url=options.base_url, key_name=options.api_key_env)
            for name in options.model or [_LOCAL]
        }
        judge = None
        if options.judge:
            judge = Judge(
                model_of(
                    options.judge, opened, base_url=options.judge_base_url, key_name=options.judge_api_key_env
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
            judge_name=options.judge or "judge",
            watch=_progress,
        )
    report = write(evaluation, options.out)
    num_answered = sum(one.is_answered for judged in evaluation.by_model.values() for one in judged)
    print(
        f"{report}: {num_answered} of {len(questions) * len(models)} questions answered every way",
        file=sys.stderr,
    )
    print(json.dumps(evaluation.summary()))
    return 0 if num_answered else _EXIT_FAILED


def model_of(
    name: str | None,
    opened: contextlib.ExitStack,
    *,
    base_url: str | None,
    key_name: str | None,
    **options: Any,
) -> Any:
    """The model that a command's ``--model`` names.

    Args:
        name: A provider by vendor and name, ``local:PATH``, ``python:PACKAGE.FUNCTION``, or ``None`` for the
            default model of ``local_backend``.
        opened: Closes the model, if it has a method ``close``.
        base_url: The URL of a server that is compatible with the vendor's.
        key_name: The environment variable that holds the key.
        **options: Further arguments of a local model, if it is one.

    Raises:
        ValueError: The name is not supported, or the variable is not set.
        ImportError: The name is of a local model, and the ``local`` extra is not installed.
        OSError: There is no such local model.
    """
    from sot_chains.providers import provider_of

    name = name or _LOCAL
    if name.startswith(_LOCAL):
        # Imported by name, so that only local models need torch.
        path = name.removeprefix(_LOCAL) or None
        return _from_python("local_backend.ChatLocal.from_pretrained", opened, path, **options)
    if name.startswith(_PYTHON):
        return _from_python(name.removeprefix(_PYTHON), opened)
    given: dict[str, Any] = {}
    if base_url:
        given["base_url"] = base_url
    if key_name:
        if not (key := os.environ.get(key_name)):
            raise ValueError(f"the environment variable {key_name} named by --api-key-env is not set")
        given["api_key"] = key
    return provider_of(name, **given)


def _from_python(
    path: str, opened: contextlib.ExitStack, *arguments: Any, **options: Any
) -> Runnable[LanguageModelInput, Any]:
    """Imports the longest module in ``package.Class.method`` and calls the attribute that follows."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (
                module_name == error.name or module_name.startswith(error.name + ".")
            ):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        model = found(*arguments, **options)
        if hasattr(model, "close"):
            opened.callback(model.close)
        return model  # type: ignore[no-any-return]  # the user's model; checked when it is used
    raise ValueError(f"{_PYTHON}{path}: no such module; give PACKAGE.FUNCTION")


def _router(name: str) -> Any:
    from sot_chains.router import RulesRouter, auto_router

    if name == "none":
        return None
    return RulesRouter() if name == "rules" else auto_router()


def _progress(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total=total, console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    sys.exit(main())
