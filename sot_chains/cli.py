"""The commands of ``sot``: ``ask``, ``eval``, ``serve`` and ``doctor``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tomllib
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from importlib.resources import files
from importlib.util import find_spec
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

from sot_chains import __version__
from sot_chains.serving.loading import LOCAL, Extras, find_model, find_vendor

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130


def run(arguments: Sequence[str] | None, extras: Extras) -> int:
    """Runs a command."""
    parser = argparse.ArgumentParser(
        prog="sot", formatter_class=argparse.RawDescriptionHelpFormatter, **_COMMANDS["sot"]
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_command(commands, "ask", _ask)
    _add_command(commands, "eval", lambda *given: asyncio.run(_evaluate(*given)))
    _add_command(commands, "serve", _serve)
    _add_command(commands, "doctor", _doctor)
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # of any encoding: an answer was paid for, so it is written
            stream.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *_, **__: f"sot: {message}\n"  # without a line of the source
    extras = replace(extras, load_local=partial(extras.load_local, device=vars(options).get("device")))
    with ExitStack() as opened:
        try:
            return int(options.run(options, extras, opened))
        except (ValueError, TypeError) as error:
            command: argparse.ArgumentParser = options.parser
            command.error(str(error))
        except (OSError, ImportError, RuntimeError) as error:
            print(f"sot: {error}", file=sys.stderr)
            return _EXIT_FAILED
        except KeyboardInterrupt:
            print("sot: interrupted", file=sys.stderr)
            return _EXIT_INTERRUPTED


_DATA = files("sot_chains")
_COMMANDS = tomllib.loads(_DATA.joinpath("commands.toml").read_text("utf-8"))
# What stands by its name there.
_NAMED: dict[str, dict[str, Any]] = {
    # Shells leave --docs=~/notes as it is.
    "type": {"number": float, "count": int, "path": lambda text: Path(text).expanduser()},
    "action": {"switch": argparse.BooleanOptionalAction},
}


def _add_command(commands: Any, name: str, work: Callable[..., int]) -> None:
    given = _COMMANDS[name]
    parser = commands.add_parser(name, help=given["help"], description=given["description"])
    parser.set_defaults(parser=parser, run=work)
    shared = {} if given.get("asks_no_model") else _COMMANDS["model"]
    for argument, options in (shared | _COMMANDS["all"] | given["arguments"]).items():
        named = {key: _NAMED[key].get(one, one) for key, one in options.items() if key in _NAMED}
        parser.add_argument(argument, **{**options, **named})


def _ask(options: argparse.Namespace, extras: Extras, opened: ExitStack) -> int:
    # Imported here so that "sot --help" does not wait for them.
    from rich.console import Console

    from sot_chains.calls.usage import Price
    from sot_chains.chain import SkeletonOfThought
    from sot_chains.display import compare, printable

    if not options.question.strip():
        raise ValueError("the question is empty")
    model = find_model(options.model, extras, opened, options.base_url, options.api_key_env)()
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else 100
    hidden = StringIO() if options.json or options.quiet else None
    console = Console(file=hidden, force_terminal=is_terminal and not hidden, width=width, highlight=False)
    sot = SkeletonOfThought(model, profile=options.profile, prices=options.price and Price(*options.price))
    plain = options.plain and not options.quiet
    answers = asyncio.run(compare(sot, options.question, console=console, plain=plain))
    if options.json:
        named = zip(("plain", "sot"), answers, strict=True)
        told = {mode: one and {"text": one.text, **one.response_metadata["sot"]} for mode, one in named}
        print(json.dumps({"model": sot.provider.model_name, **told}))
    elif options.quiet:
        print(printable(answers[1].text))
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
    # All are checked before the first is loaded, which may take long.
    given = options.base_url, options.api_key_env
    loads = {name: find_model(name, extras, opened, *given) for name in options.model or [LOCAL]}
    given = options.judge_base_url, options.judge_api_key_env
    load_judge = find_model(options.judge, extras, opened, *given) if options.judge else None
    models = {name: load() for name, load in loads.items()}
    routers = {"none": None, "rules": RulesRouter(), "shipped": auto_router()}
    judge = None
    if load_judge:
        judge = Judge(
            load_judge(),
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
        watch=partial(track, console=Console(stderr=True), transient=True, disable=options.quiet),
    )
    report = write(evaluation, options.out)
    num_answered = sum(not one.failure for results in evaluation.by_model.values() for one in results)
    num_questions = len(questions) * len(models)
    if not options.quiet:
        print(f"{report}: {num_answered} of {num_questions} questions answered every way", file=sys.stderr)
    print(json.dumps(evaluation.summary()))
    return 0 if num_answered else _EXIT_FAILED


def _serve(options: argparse.Namespace, extras: Extras, opened: ExitStack) -> int:
    try:
        from sot_chains.serving.app import create_app
    except ImportError as error:
        how = "pip install '.[serve]' in a checkout"
        raise ImportError(f"sot serve needs the extra serve: {how} ({error})") from error
    from sot_chains.calls.usage import Price
    from sot_chains.providers import make_provider

    if not 0 <= options.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {options.port}")
    if options.docs is not None and not options.docs.is_dir():
        raise NotADirectoryError(f"--docs: {options.docs} is not a folder")
    # Before the model is loaded, which takes long: another program may listen there.
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = opened.enter_context(socket.create_server((options.host, options.port), family=family))
    options.api_key = options.api_key or os.environ.get("SOT_API_KEY") or None
    vendor = find_vendor(options.model)
    # A drafter that copies decodes at the same speed without references.
    drafter = {} if vendor else {"drafter": "reference_copy"}
    given = options.base_url, options.api_key_env
    model = find_model(options.model, extras, opened, *given, needs_key=False)(**drafter)
    key = f"{vendor.upper()}_API_KEY" if vendor else None
    passes_keys = key is not None and not options.api_key_env and not os.environ.get(key)
    if passes_keys and options.api_key and not model.is_elsewhere:
        raise ValueError(f"clients send this server's own key: set the vendor's in {key} or by --api-key-env")
    make = partial(make_provider, options.model, base_url=options.base_url)
    app = create_app(
        model,
        copying=extras.make_copying(model, options.docs),
        model_for_key=(lambda key: make(api_key=key)) if passes_keys and not options.api_key else None,
        api_key=options.api_key,
        prices=Price(*options.price) if options.price else None,
        profile=options.profile,
        host=options.host,
        in_turn=vendor is None,
        allow=options.allow,
    )
    return _run_server(app, options, listening)


def _run_server(app: Any, options: argparse.Namespace, listening: socket.socket) -> int:
    import uvicorn

    from sot_chains.serving.app import is_loopback

    if not is_loopback(options.host) and not options.api_key:
        print("sot: no authentication on a public address; set --api-key", file=sys.stderr)
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    if not options.quiet:
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


def _doctor(options: argparse.Namespace, extras: Extras, opened: ExitStack) -> int:
    from jinja2 import Template
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    known = tomllib.loads(_DATA.joinpath("doctor.toml").read_text("utf-8"))
    # The first on the path counts, as it does for imports; none of them is imported.
    packages = reversed([*metadata.distributions()])
    here = {canonicalize_name(one.name or ""): one.version for one in packages}
    required = list(map(Requirement, metadata.requires(known["libraries"][0]) or ()))
    found: dict[str, Any] = {"versions": {"python": sys.version.split()[0]}, "extras": {}}
    found["versions"] |= {name: here.get(name) for name in known["libraries"]}
    for extra, use in known["extras"].items():
        needed = [one for one in required if one.marker and one.marker.evaluate({"extra": extra})]
        lacks = [one for one in needed if here.get(canonicalize_name(one.name), "0") not in one.specifier]
        names = [f"{one.name}{one.specifier}" for one in lacks]
        found["extras"][extra] = {"for": use, "is_here": bool(needed) and not lacks, "lacks": names}
    found["models"] = {name: {**one, "at": _find_file(**one["at"])} for name, one in known["models"].items()}
    keys = known["keys"].items()
    found["keys"] = {key: {"for": use, "is_set": bool(os.environ.get(key))} for key, use in keys}
    found["machine"] = extras.examine_machine(known["machine"], options.torch)
    template = Template(_DATA.joinpath("doctor.txt").read_text("utf-8"), trim_blocks=True)
    shown = template.render(found, code=__version__, quiet=options.quiet)
    print(json.dumps(found) if options.json else shown)
    return 0


def _find_file(package: str, file: str, cached: str) -> str | None:
    """Where a model is: in its package, or in the hub's cache."""
    spec, home = find_spec(package), os.environ.get("HF_HOME") or "~/.cache/huggingface"
    packaged = [Path(folder, file) for folder in (spec and spec.submodule_search_locations) or ()]
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    found = (*packaged, *cache.glob(f"{cached}/snapshots/*/config.json"))
    return next((str(path) for path in found if path.is_file()), None)
