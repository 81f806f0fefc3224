"""``sot serve``: its arguments, and the server's life. The command line gives it the models."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sot_chains.serving.loading import LOCAL, PYTHON, Extras, load_model

if TYPE_CHECKING:
    from sot_chains.providers import Provider

_EXIT_FAILED = 1
_KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}


def add_serve(commands: Any) -> None:
    """Adds ``serve`` to the commands of ``sot``."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to any OpenAI client, and a page that shows how it answers",
        description="Serves MODEL, MODEL:sot (point by point) and MODEL:auto (as the router decides) over "
        "OpenAI's chat protocol at /v1, and at / a page where the ways race.",
    )
    parser.add_argument(
        "--model",
        default="default",
        metavar="MODEL",
        help="openai:NAME, anthropic:NAME, python:PACKAGE.FUNCTION, or for a model that runs here: default, "
        "a folder, a GGUF file or a name on the hub",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="the port (8000); 0 for any that is free")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="answer from these documents, too")
    parser.add_argument("--api-key", metavar="KEY", help="what clients must send (SOT_API_KEY)")
    parser.add_argument("--base-url", metavar="URL", help="a server that is compatible with the vendor's")
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="the environment variable with the vendor's key; if there is "
        "none, each client's own key is passed on",
    )
    parser.add_argument(
        "--price",
        nargs=2,
        type=float,
        metavar=("INPUT", "OUTPUT"),
        help="of a million tokens, for the page's table",
    )
    parser.set_defaults(parser=parser, run=_serve)


def _serve(options: argparse.Namespace, extras: Extras) -> int:
    try:
        from sot_chains.serving.app import create_app
    except ImportError as error:
        print(f"sot: serving needs more: pip install '.[web]' in a checkout ({error})", file=sys.stderr)
        return _EXIT_FAILED
    if not 0 <= options.port <= 65535:
        options.parser.error(f"--port must be from 0 to 65535, got {options.port}")
    with contextlib.ExitStack() as opened:
        try:
            app = create_app(**_settings(options, extras, opened))
        except (ValueError, TypeError, AttributeError) as error:
            options.parser.error(str(error))
        except (OSError, ImportError, RuntimeError) as error:
            print(f"sot: {error}", file=sys.stderr)
            return _EXIT_FAILED
        return _run(app, options)


def _run(app: Any, options: argparse.Namespace) -> int:
    """Serves until it is interrupted, and says where."""
    import uvicorn

    from sot_chains.serving.app import is_loopback

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}"
            print(f"Serving {options.model}: the page is {url}/, the API {url}/v1", flush=True)

    if not is_loopback(options.host) and not options.api_key:
        print("sot: whoever reaches this address may ask: set --api-key", file=sys.stderr)
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
    server = Server(config)
    handler = logging.StreamHandler()
    logging.getLogger("uvicorn").addHandler(handler)
    try:
        server.run()
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # uvicorn has said why, such as that the port is taken
        return _EXIT_FAILED
    finally:
        logging.getLogger("uvicorn").removeHandler(handler)
    return 0


def _settings(options: argparse.Namespace, extras: Extras, opened: contextlib.ExitStack) -> dict[str, Any]:
    """The arguments of :func:`~sot_chains.serving.app.create_app`."""
    from sot_chains.calls.usage import Price

    api_key = options.api_key or os.environ.get("SOT_API_KEY") or None
    vendor = options.model.partition(":")[0]
    is_vendor = vendor in _KEYS
    given = {"base_url": options.base_url, "key_name": options.api_key_env}
    # A drafter that copies writes the same without references, at the same speed.
    model = load_model(_full_name(options.model), extras, opened, **given, drafter="reference_copy")
    passes_keys = is_vendor and not options.api_key_env and not os.environ.get(_KEYS[vendor])
    if passes_keys and api_key and not model.is_elsewhere:
        raise ValueError(
            f"clients send this server's own key, so set the vendor's in {_KEYS[vendor]} or by --api-key-env"
        )
    return {
        "model": model,
        "copying": extras.make_copying(model, options.docs),
        "model_for_key": partial(_of_key, options) if passes_keys and not api_key else None,
        "api_key": api_key,
        "prices": Price(*options.price) if options.price else None,
        "host": options.host,
        "in_turn": not is_vendor,
    }


def _full_name(name: str) -> str:
    """The model's name as the other commands take it."""
    if name == "default":
        return "local:"
    return name if name.startswith((*(f"{vendor}:" for vendor in _KEYS), LOCAL, PYTHON)) else f"local:{name}"


def _of_key(options: argparse.Namespace, key: str) -> Provider:
    """The vendor's model with a client's key."""
    from sot_chains.providers import provider_of

    base_url = {"base_url": options.base_url} if options.base_url else {}
    return provider_of(options.model, api_key=key, **base_url)
