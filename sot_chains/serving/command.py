"""``sot serve``: its arguments, and the server's life."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sot_chains.serving.loading import (
    LOCAL,
    PYTHON,
    Extras,
    add_model_arguments,
    add_profile_argument,
    load_model,
)

_KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}


def add_serve(commands: Any) -> None:
    """Adds ``serve`` to the commands of ``sot``."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to any OpenAI client, and a page that shows how it answers",
        description="Serves MODEL, MODEL:sot (Skeleton-of-Thought) and MODEL:auto (as the router decides) "
        "over OpenAI's protocol at /v1, and at / a page where these modes race. If there is no key for a "
        "vendor's model, each client's own key is passed on.",
    )
    names = (
        "openai:NAME, anthropic:NAME, python:PACKAGE.FUNCTION, or to run it here: default, a folder, a GGUF "
    )
    add_model_arguments(parser, default="default", help=f"{names}file or a name on the hub (default)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="the port (8000); 0 for any that is free")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="answer from these documents, too")
    parser.add_argument("--api-key", metavar="KEY", help="what clients must send (SOT_API_KEY)")
    price = "of a million tokens, for the page's table"
    parser.add_argument("--price", nargs=2, type=float, metavar=("INPUT", "OUTPUT"), help=price)
    add_profile_argument(parser)
    parser.set_defaults(parser=parser, run=_serve)


def _serve(options: argparse.Namespace, extras: Extras, opened: ExitStack) -> int:
    try:
        from sot_chains.serving.app import create_app
    except ImportError as error:
        raise ImportError(
            f"sot serve needs the extra web: pip install '.[web]' in a checkout ({error})"
        ) from error
    from sot_chains.calls.usage import Price
    from sot_chains.providers import make_provider

    if not 0 <= options.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {options.port}")
    options.api_key = options.api_key or os.environ.get("SOT_API_KEY") or None
    name, vendor = options.model, options.model.partition(":")[0]
    if name == "default":
        name = LOCAL
    elif vendor not in _KEYS and not name.startswith((LOCAL, PYTHON)):
        name = LOCAL + name
    given = {"base_url": options.base_url, "key_name": options.api_key_env}
    # A drafter that copies decodes at the same speed without references.
    model = load_model(name, extras, opened, **given, drafter="reference_copy")

    def model_for_key(key: str) -> Any:
        base_url = {"base_url": options.base_url} if options.base_url else {}
        return make_provider(name, api_key=key, **base_url)

    passes_keys = vendor in _KEYS and not options.api_key_env and not os.environ.get(_KEYS[vendor])
    if passes_keys and options.api_key and not model.is_elsewhere:
        raise ValueError(
            f"clients send this server's own key, so set the vendor's in {_KEYS[vendor]} or by --api-key-env"
        )
    app = create_app(
        model,
        copying=extras.make_copying(model, options.docs),
        model_for_key=model_for_key if passes_keys and not options.api_key else None,
        api_key=options.api_key,
        prices=Price(*options.price) if options.price else None,
        profile=options.profile,
        host=options.host,
        in_turn=vendor not in _KEYS,
    )
    return _run(app, options)


def _run(app: Any, options: argparse.Namespace) -> int:
    """Serves until it is interrupted, and prints the address."""
    import uvicorn

    from sot_chains.serving.app import is_loopback

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}"
            print(f"Serving {options.model}: the page is {url}/, the API {url}/v1", flush=True)

    if not is_loopback(options.host) and not options.api_key:
        print("sot: no authentication on a public address; set --api-key", file=sys.stderr)
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        log_config=None,  # uvicorn's own closes what handlers of other packages write to
        ws="none",
        server_header=False,
        timeout_keep_alive=60,  # longer than clients keep a connection, so that none is closed while it asks
    )
    handler = logging.StreamHandler()
    logging.getLogger("uvicorn").addHandler(handler)
    try:
        Server(config).run()
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # uvicorn has said why, such as that the port is taken
        return 1
    finally:
        logging.getLogger("uvicorn").removeHandler(handler)
    return 0
