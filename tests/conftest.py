"""For every test: nothing beyond this machine can be reached, and no key or tracer of the user is used.

And the default model, loaded once for all tests of a worker.
"""

import gc
import ipaddress
import os
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from local_backend import ChatLocal


_MOST_MEMORY = 3_000_000_000  # bytes that a worker may hold before it looks for what can be given back


# Processes that compile beside this one would each import torch, for the few graphs of the tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Fewer examples where slow tests are left out, too."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported stays: garbage is not searched for in it, neither now nor while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that run everything together come first: workers then end with short ones, at the same time."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture(scope="session")
def default_chat() -> "Iterator[ChatLocal]":
    """The default model in float32, in which decoding methods can be compared word for word.

    What a draft costs is given: on a busy machine it may be measured to be too much for any.
    """
    from local_backend import ChatLocal, Engine
    from local_backend.models.forward_cost import ForwardCost

    with (
        ChatLocal.default(dtype="float32") as loaded,
        Engine(loaded.engine.model, loaded.engine.tokenizer, width_costs=ForwardCost.flat(64)) as engine,
    ):
        yield ChatLocal(engine=engine, model_name=loaded.model_name, max_tokens=48)


@pytest.fixture(scope="session")
def default_copying(default_chat: "ChatLocal") -> "Iterator[ChatLocal]":
    """The same weights, with reference copy."""
    from local_backend import ChatLocal, Engine

    plain = default_chat.engine
    with Engine(plain.model, plain.tokenizer, "reference_copy", width_costs=plain.width_costs) as engine:
        yield ChatLocal(engine=engine, model_name=default_chat.model_name, max_tokens=48)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> "Iterator[InMemorySpanExporter]":
    """What OpenTelemetry's SDK records during a test; its global provider can be set only once a process."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


@pytest.fixture(autouse=True, scope="module")
def _models_are_given_back() -> Iterator[None]:
    """Models in reference cycles are collected: Python does not know how large they are."""
    yield
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    if pages * os.sysconf("SC_PAGE_SIZE") > _MOST_MEMORY:
        gc.collect()


def _is_local(host: object) -> bool:
    if host is None or host in ("", "localhost", b"localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host.decode() if isinstance(host, bytes) else str(host)).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded(original: Any) -> Any:
        def connect(self: socket.socket, address: Any, *args: Any) -> Any:
            if self.family != socket.AF_UNIX and not _is_local(address[0]):
                raise OSError(f"tests must not reach the network: connection to {address!r}")
            return original(self, address, *args)

        return connect

    original_getaddrinfo = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_local(host):
            raise OSError(f"tests must not reach the network: look-up of {host!r}")
        return original_getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture(autouse=True)
def _no_environment_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_", "LANGSMITH_", "LANGCHAIN_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
