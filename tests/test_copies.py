"""Chains over named models can be copied and pickled: process pools and Ray take them."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from langchain_core.documents import Document

from retrieval_copy import BM25Retriever, RetrievalCopyChain
from sot_chains import Limits, Price, Retries, SkeletonOfThought
from sot_chains.calls.rate_limits import limiter_for
from sot_chains.router import PromptedRouter, RulesRouter
from tests.sot_chains.fakes import ANSWER, QUESTION, sot_of
from tests.sot_chains.server import MODEL, ChatServer, chat_server

WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, lambda chain: pickle.loads(pickle.dumps(chain))]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wire", ["openai", "anthropic"])
def test_a_copy_answers_and_shares_the_limits(
    way: Callable[[Any], Any], wire: str, server: ChatServer
) -> None:
    url = server.url if wire == "openai" else server.anthropic_url
    sot = sot_of(
        f"{wire}:{MODEL}",
        base_url=url,
        api_key="s3cret",
        prefill=False,
        limits=Limits(requests_per_minute=500, tokens_per_minute=10**6),
        prices={MODEL: Price(1.0, 2.0)},
        retries=Retries(max_attempts=2, longest_wait_seconds=7.0),
    )
    assert sot.invoke(QUESTION).text == ANSWER
    copied = way(sot)
    assert copied.invoke(QUESTION).text == ANSWER
    assert copied.options.limiter is sot.options.limiter
    assert copied.options.retries == sot.options.retries
    assert repr(copied.provider) == repr(sot.provider)
    assert set(server.keys) == {"s3cret"}


@pytest.mark.parametrize("way", WAYS)
def test_limits_without_a_key_are_those_of_the_object(way: Callable[[Any], Any]) -> None:
    ours, others = Limits(max_concurrent=3), Limits(max_concurrent=3)
    assert limiter_for(ours, None) is limiter_for(way(ours), None)
    assert limiter_for(ours, None) is not limiter_for(others, None)
    limiter = limiter_for(ours, None)
    assert way({"a": limiter, "b": limiter})["b"] is limiter


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("router", ["auto", "rules", "prompted"])
def test_routers_travel(way: Callable[[Any], Any], router: str) -> None:
    routers: dict[str, Any] = {
        "auto": "auto",
        "rules": RulesRouter(),
        "prompted": PromptedRouter("openai:m"),
    }
    sot = SkeletonOfThought("openai:m", api_key="k", router=routers[router])
    assert way(sot).options.router is not None
    assert len(pickle.dumps(sot)) < 1_000_000  # the weights that everybody has do not travel with it


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_that_retrieves(way: Callable[[Any], Any], server: ChatServer) -> None:
    documents = [Document("Close the curtains."), Document("Drink no coffee.")]
    model = SkeletonOfThought(f"openai:{MODEL}", base_url=server.url, router="always")
    for chain in (
        RetrievalCopyChain(BM25Retriever(documents=documents), f"openai:{MODEL}", base_url=server.url),
        RetrievalCopyChain(BM25Retriever(documents=documents), model),
    ):
        assert way(chain).invoke(QUESTION).text == chain.invoke(QUESTION).text


def test_another_process_answers_with_a_pickled_chain(server: ChatServer) -> None:
    sot = SkeletonOfThought(f"openai:{MODEL}", base_url=server.url, limits=Limits(max_concurrent=2, key="a"))
    code = (
        "import pickle, sys; sot = pickle.load(sys.stdin.buffer); print(sot.invoke('How can I sleep?').text)"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, input=pickle.dumps(sot), capture_output=True, timeout=60, check=False)
    assert done.stderr == b""
    assert done.stdout.decode() == f"{ANSWER}\n"


def test_a_client_of_ones_own_stays_where_it_is() -> None:
    sot = SkeletonOfThought("openai:m", router="always", http_client=httpx2.AsyncClient())
    assert copy.deepcopy(sot).provider is sot.provider
    with pytest.raises(TypeError, match=r"http_client=\.\.\. cannot be pickled"):
        pickle.dumps(sot)
