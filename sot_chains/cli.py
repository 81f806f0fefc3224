"""The commands of ``sot``: ``ask``, ``eval`` and ``serve``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.resources import files
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from sot_chains.serving.loading import LOCAL, Extras, find_vendor, load_model

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130


def run(arguments: Sequence[str] | None, extras: Extras) -> int:
    """Runs a command."""
    parser = argparse.ArgumentParser(
        prog="sot", description="Skeleton-of-Thought: answers written point by point, in parallel."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_command(commands, "ask", _ask)
    _add_command(commands, "eval", lambda *given: asyncio.run(_evaluate(*given)))
    _add_command(commands, "serve", _serve)
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # of any encoding: an answer was paid for, so it is written
            stream.reconfigure(errors="replace")
    from sot_chains.providers import ProviderError

    extras = Extras(partial(extras.load_local, device=options.device), extras.make_copying)
    with ExitStack() as opened:
        try:
            return int(options.run(options, extras, opened))
        except (ValueError, TypeError) as error:
            command: argparse.ArgumentParser = options.parser
            command.error(str(error))
        except (OSError, ImportError, RuntimeError, ProviderError) as error:
            print(f"sot: {error}", file=sys.stderr)
            return _EXIT_FAILED
        except KeyboardInterrupt:
            print("sot: interrupted", file=sys.stderr)
            return _EXIT_INTERRUPTED


def _path(text: str) -> Path:
    return Path(text).expanduser()  # shells leave --docs=~/notes as it is


_COMMANDS = tomllib.loads(files("sot_chains").joinpath("commands.toml").read_text("utf-8"))
# What stands by its name there.
_NAMED: dict[str, dict[str, Any]] = {
    "type": {"number": float, "count": int, "path": _path},
    "action": {"switch": argparse.BooleanOptionalAction},
}


def _add_command(commands: Any, name: str, work: Callable[..., int]) -> None:
    given = _COMMANDS[name]
    parser = commands.add_parser(name, help=given["help"], description=given["description"])
    parser.set_defaults(parser=parser, run=work)
    for argument, options in (_COMMANDS["all"] | given["arguments"]).items():
        named = {key: _NAMED[key].get(one, one) for key, one in options.items() if key in _NAMED}
        parser.add_argument(argument, **{**options, **named})


def _ask(options: argparse.Namespace, extras: Extras, opened: ExitStack) -> int:
    # Imported here so that "sot --help" does not wait for them.
    from rich.console import Console

    from sot_chains.calls.usage import Price
    from sot_chains.chain import SkeletonOfThought
    from sot_chains.display import compare

    if not options.question.strip():
        raise ValueError("the question is empty")
    model = load_model(options.model, extras, opened, options.base_url, options.api_key_env)
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else 100
    console = Console(force_terminal=is_terminal, width=width, highlight=False)
    prices = Price(*options.price) if options.price else None
    sot = SkeletonOfThought(model, profile=options.profile, prices=prices)
    asyncio.run(compare(sot, options.question, console=console, plain=options.plain))
    return 0


async def _evaluate(options: argparse.Namespace, extras: Extras, opened: ExitStack) -> int:
    from rich.console import Console
    from rich.progress import track

    from sot_chains.calls.rate_limits import Limits
    from sot_chains.evaluation import Judge, Store, evaluate, read_questions, write
    from sot_chains.router import RulesRouter, auto_router

    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {options.limit}")
    questions = read_questions(options.questions)[: options.limit]
    store = opened.enter_context(Store(options.out / "store.jsonl"))
    given = options.base_url, options.api_key_env
    models = {name: load_model(name, extras, opened, *given) for name in options.model or [LOCAL]}
    routers = {"none": None, "rules": RulesRouter(), "shipped": auto_router()}
    judge = None
    if options.judge:
        given = options.judge_base_url, options.judge_api_key_env
        judge = Judge(
            load_model(options.judge, extras, opened, *given),
            store=store,
            label=options.judge,
            timeout_seconds=options.judge_timeout,
            limits=Limits(max_concurrent=8),
        )
    evaluation = await evaluate(
        questions,
        models,
        store=store,
        router=routers[options.router],
        judge=judge,
        watch=partial(track, console=Console(stderr=True), transient=True),
    )
    report = write(evaluation, options.out)
    num_answered = sum(not one.failure for results in evaluation.by_model.values() for one in results)
    num_questions = len(questions) * len(models)
    print(f"{report}: {num_answered} of {num_questions} questions answered every way", file=sys.stderr)
    print(json.dumps(evaluation.summary()))
    return 0 if num_answered else _EXIT_FAILED


def _serve(options: argparse.Namespace, extras: Extras, opened: ExitStack) -> int:
    try:
        from sot_chains.serving.app import create_app
    except ImportError as error:
        message = f"sot serve needs the extra serve: pip install '.[serve]' in a checkout ({error})"
        raise ImportError(message) from error
    from sot_chains.calls.usage import Price
    from sot_chains.providers import make_provider

    if not 0 <= options.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {options.port}")
    options.api_key = options.api_key or os.environ.get("SOT_API_KEY") or None
    vendor = find_vendor(options.model)
    # A drafter that copies decodes at the same speed without references.
    drafter = {} if vendor else {"drafter": "reference_copy"}
    model = load_model(options.model, extras, opened, options.base_url, options.api_key_env, **drafter)
    key = f"{vendor.upper()}_API_KEY" if vendor else None
    passes_keys = key is not None and not options.api_key_env and not os.environ.get(key)
    if passes_keys and options.api_key and not model.is_elsewhere:
        message = f"clients send this server's own key, so set the vendor's in {key} or by --api-key-env"
        raise ValueError(message)

    def model_for_key(key: str) -> Any:
        return make_provider(options.model, api_key=key, base_url=options.base_url)

    app = create_app(
        model,
        copying=extras.make_copying(model, options.docs),
        model_for_key=model_for_key if passes_keys and not options.api_key else None,
        api_key=options.api_key,
        prices=Price(*options.price) if options.price else None,
        profile=options.profile,
        host=options.host,
        in_turn=vendor is None,
        allow=options.allow,
    )
    return _run_server(app, options)


def _run_server(app: Any, options: argparse.Namespace) -> int:
    import uvicorn

    from sot_chains.serving.app import is_loopback

    if not is_loopback(options.host) and not options.api_key:
        print("sot: no authentication on a public address; set --api-key", file=sys.stderr)
    is_v6 = ":" in options.host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listening:
        host = f"[{options.host}]" if is_v6 else options.host
        url = f"http://{host}:{listening.getsockname()[1]}"
        print(f"Serving {options.model or 'default'}: the page is {url}/, the API {url}/v1", flush=True)
        config = uvicorn.Config(
            app,
            log_level="warning",
            log_config=None,  # uvicorn's own closes what handlers of other packages write to
            ws="none",
            server_header=False,
            timeout_keep_alive=60,  # longer than clients keep a connection, so none is closed while it asks
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run([listening])
    return 0
