"""The console command ``sot``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sot_chains import cli_eval

if TYPE_CHECKING:
    from sot_chains.chain import SkeletonOfThought

_EXIT_FAILED, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130
_PIPED_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Without the program's name; those of the process by default.

    Returns:
        0 if the question was answered, 1 if the model could not be asked (one line on standard error says
        why), 130 if interrupted.

    Raises:
        SystemExit: With code 2, the arguments make no sense; with code 0, help was asked for.
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
    ask.add_argument("--model", metavar="VENDOR:NAME", help=cli_eval.MODELS)
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
    cli_eval.add_parser(commands)
    return parser


def _ask(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # Here rather than above: "sot --help" should not wait for them.
    from sot_chains.chain import SkeletonOfThought

    if not options.question.strip():
        parser.error("the question is empty")
    with contextlib.ExitStack() as opened:
        try:
            model = cli_eval.model_of(
                options.model, opened, base_url=options.base_url, key_name=options.api_key_env
            )
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

    if sys.stdout.isatty():
        console = Console(highlight=False)
    else:
        console = Console(force_terminal=False, width=_PIPED_WIDTH, highlight=False)
    try:
        asyncio.run(compare(sot, options.question, console=console, plain=options.plain))
    except ProviderError as error:
        print(f"sot: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
