"""A fan-out reads its prompt once and pays for it once, on a server that caches and bills as vendors do."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from benchmarks.paced_server import PacedServer, paced_server
from benchmarks.vendor_account import ANTHROPIC, OPENAI, OPENAI_EARLIER, Terms, total
from sot_chains import Price, PromptCaching, Retries, SkeletonOfThought, close_clients
from sot_chains.calls.prefix_cache import PrefixCache, Shared, find_known
from sot_chains.calls.usage import total_tokens
from sot_chains.providers import make_provider

_CLAUDE = Terms("anthropic", "marks", least_tokens=512, counts_reads=False)
_PACE: dict[str, Any] = {"first_token_seconds": 0.02, "tokens_per_second": 2000.0, "point_tokens": 12}
_WIRES: dict[str, Terms] = {"anthropic:claude-opus-5": _CLAUDE, "openai:gpt-5.6-sol": OPENAI}


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await close_clients()


def question(num_tokens: int, number: int = 0) -> str:
    """A question with documents of so many tokens."""
    documents = " ".join(f"word{place} of the document {number}." for place in range(num_tokens))
    return documents[: num_tokens * 4 - 40] + "\nHow do I get more done in a day?"


def named(model: str, server: PacedServer) -> Any:
    return make_provider(model, base_url=server.url, api_key="k")


def wrapped(model: str, server: PacedServer) -> Any:
    vendor, _, name = model.partition(":")
    if vendor == "openai":
        given = {"base_url": server.url, "api_key": "k", "stream_usage": True, "max_retries": 0}
        return ChatOpenAI(model=name, use_responses_api=False, **given)
    return ChatAnthropic(
        model_name=name, base_url=server.url, api_key="k", max_retries=0, timeout=60, stop=None
    )


def of_responses(model: str, server: PacedServer) -> Any:
    name = model.removeprefix("openai:")
    given: dict[str, Any] = {"base_url": server.url, "api_key": "k", "max_retries": 0}
    return ChatOpenAI(model=name, **given)  # which it takes for this model by itself


def sot(model: Any, **options: Any) -> SkeletonOfThought:
    return SkeletonOfThought(model, router="always", **options)


def in_prefixes(server: PacedServer, num_tokens: int) -> float:
    return sum(charge.input_cost() for charge in server.charges) / num_tokens


@pytest.mark.parametrize(
    ("model", "most", "make"),
    [
        ("anthropic:claude-opus-5", 2.1, named),
        ("anthropic:claude-opus-5", 2.1, wrapped),
        ("openai:gpt-5.6-sol", 2.2, named),
        ("openai:gpt-5.6-sol", 2.2, wrapped),
        ("openai:gpt-5.6-sol", 2.2, of_responses),
    ],
)
async def test_a_prompt_is_written_once_and_read_by_all_points(
    model: str, most: float, make: Callable[[str, PacedServer], Any]
) -> None:
    with paced_server(num_points=8, terms=_WIRES[model], **_PACE) as server:
        message = await sot(make(model, server)).ainvoke(question(6000))
        trace = message.response_metadata["sot"]
        assert len(trace["points"]) == 8
        assert in_prefixes(server, 6000) <= most
        assert trace["cost"]["reported"] == total(server.charges)
        assert trace["cost"]["estimated"] is None
        # What all calls share is a block of its own, the same in each of them.
        messages = [request.get("messages") or request["input"] for request in server.requests]
        assert all("input" in request for request in server.requests) == (make is of_responses)
        blocks = [one[0]["content"][0] for one in messages]
        assert len({json.dumps(block) for block in blocks}) == 1
        assert blocks[0]["text"].strip() == question(6000)
    with paced_server(num_points=8, terms=_WIRES[model], **_PACE) as server:
        await sot(make(model, server), caching=PromptCaching("off")).ainvoke(question(6000))
        assert in_prefixes(server, 6000) > 9


@pytest.mark.parametrize("model", [*_WIRES, "openai:gpt-5", "openai:my-own"])
async def test_a_short_prompt_is_sent_as_it_is(model: str) -> None:
    sent = []
    terms = _WIRES.get(model, OPENAI_EARLIER)
    for mode in ("auto", "off"):
        with paced_server(num_points=4, terms=terms, **_PACE) as server:
            await sot(named(model, server), caching=PromptCaching(mode)).ainvoke(question(300))
            sent.append(sorted(map(json.dumps, server.requests)))
    assert sent[0] == sent[1]
    assert "cache" not in str(sent)


async def test_earlier_models_of_openai_get_one_key_and_no_mark() -> None:
    with paced_server(num_points=8, terms=OPENAI_EARLIER, **_PACE) as server:
        await sot(named("openai:gpt-5", server)).ainvoke(question(6000))
        assert in_prefixes(server, 6000) < 2.1
        assert len({request["prompt_cache_key"] for request in server.requests}) == 1
        assert "breakpoint" not in str(server.requests)
        assert "prompt_cache_options" not in str(server.requests)


async def test_documents_before_the_question_are_shared_by_small_models_requests_too() -> None:
    messages = [SystemMessage(question(3000)), HumanMessage("How do I get more done in a day?")]
    with paced_server(num_points=5, terms=ANTHROPIC, **_PACE) as server:
        model = named("anthropic:claude-sonnet-5", server)
        await sot(model, profile="small").ainvoke(messages)
        assert sum(charge.cached_tokens >= 2900 for charge in server.charges) == 5
        assert all("cache_control" in request["system"][-1] for request in server.requests)


async def test_points_without_an_outline_wait_for_the_first() -> None:
    with paced_server(num_points=5, terms=_CLAUDE, failing="Fewer meetings", **_PACE) as server:
        chain = sot(named("anthropic:claude-opus-5", server), retries=Retries(max_attempts=1))
        trace = (await chain.ainvoke(question(3000))).response_metadata["sot"]
        assert [failure["label"] for failure in trace["failures"]] == ["Fewer meetings"]
        server.pace.failing = None
        server._cache._entries.clear()
        before = len(server.charges)
        trace["points"] = [{**point, "status": "failed"} for point in trace["points"]]
        resumed = await chain.ainvoke(question(3000), resume=trace)
        assert resumed.response_metadata["sot"]["is_complete"]
        charges = server.charges[before:]
        assert len(charges) == 5
        assert sum(charge.cache_write_tokens > 2900 for charge in charges) == 1


async def test_a_refusal_is_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PacedServer._answer

    async def strict(self: PacedServer, request: dict[str, Any], reader: Any, writer: Any) -> None:
        if "cache" in str(request):
            from benchmarks.paced_server import _refuse

            self.num_refused += 1
            return await _refuse(writer, 400, "unknown field prompt_cache_key")
        return await real(self, request, reader, writer)

    monkeypatch.setattr(PacedServer, "_answer", strict)
    with paced_server(num_points=4, terms=OPENAI, **_PACE) as server:
        chain = sot(named("openai:gpt-5.6", server))
        for _ in range(2):
            trace = (await chain.ainvoke(question(3000))).response_metadata["sot"]
            assert trace["is_complete"]
        assert server.num_refused == 1


def test_keys_are_split_and_marks_are_at_most_four() -> None:
    known = find_known(make_provider("openai:gpt-5.6", api_key="k"))
    assert known is not None
    messages = [HumanMessage(question(2000, number=7) + "\n\nOutline, please.")]
    shared = Shared(len(question(2000, number=7)))
    keys = []
    for _ in range(3):
        cache = PrefixCache(known, PromptCaching(), {})
        keys += [cache.plan(messages, shared, 0, 0).fields["prompt_cache_key"] for _ in range(9)]
    assert [len(set(keys[start : start + 9])) for start in (0, 9, 18)] == [1, 1, 1]
    assert len(set(keys)) == 3
    claude = find_known(make_provider("anthropic:claude-opus-5", api_key="k"))
    assert claude is not None
    own: list[str | dict[str, Any]] = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}} for _ in range(3)
    ]
    both = [SystemMessage(own), *messages]
    plan = PrefixCache(claude, PromptCaching(ttl="1h"), {}).plan(both, shared, 1, 0)
    marks = [block for one in plan.messages for block in one.content if "cache_control" in block]
    assert len(marks) == 4
    assert marks[-1]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}  # type: ignore[index]  # is a block


def test_what_a_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="lifetimes"):
        SkeletonOfThought("anthropic:claude-opus-5", api_key="k", caching=PromptCaching(ttl="30m"))
    with pytest.raises(ValueError, match="mode"):
        PromptCaching("always")  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(ValueError, match="no fast tier"):
        SkeletonOfThought("anthropic:claude-sonnet-5", api_key="k", speed="fast")
    with pytest.raises(ValueError, match="Anthropic"):
        SkeletonOfThought("openai:gpt-5.6", api_key="k", speed="fast")
    assert find_known(make_provider("openai:claude-opus-5", api_key="k")) is None


PRICE = Price(
    2, 10, cached_input=0.2, cache_write=2.5, cache_write_1h=4, tiers={"fast": Price(4, 20, 0.4, 5, 8)}
)


@pytest.mark.parametrize("seed", range(20))
async def test_the_trace_tells_what_the_server_bills(seed: int) -> None:
    """Writes, reads, tiers, retries, a stream that breaks off or is cancelled, a point that fails."""
    draw = random.Random(seed)
    model = draw.choice(list(_WIRES))
    is_openai = model.startswith("openai")
    tier = draw.choice([None, "fast"])
    fault = draw.choice(["none", "busy", "cut", "failing", "deadline"])
    pace: dict[str, Any] = {**_PACE, "num_points": draw.randint(3, 8), "point_tokens": draw.randint(8, 40)}
    if fault == "deadline":
        pace |= {"stalls_at": 6}
    pace |= {"failing": "Fewer meetings"} if fault == "failing" else {}
    pace |= {"cut_once": "Fewer meetings"} if fault == "cut" else {}
    with paced_server(terms=_WIRES[model], num_busy=2 if fault == "busy" else 0, **pace) as server:
        options = {"service_tier" if is_openai else "speed": tier} if tier else {}
        ttl = draw.choice([None, "30m" if is_openai else "1h"])
        caching = PromptCaching(draw.choice(["auto", "shared"]), ttl=ttl)
        prices, retries = PRICE, Retries(max_attempts=3, first_pause_seconds=0.02)
        provider = make_provider(model, base_url=server.url, api_key="k", **options)
        chain = sot(provider, caching=caching, prices=prices, retries=retries)
        arguments = {"deadline_seconds": 1.2} if fault == "deadline" else {}
        size = draw.choice([200, 1500, 4000])
        chunks = [chunk async for chunk in chain.astream(question(size, seed), **arguments)]
        last: AIMessageChunk = chunks[-1]
        cost = last.response_metadata["sot"]["cost"]
        await close_clients()
        billed: Any = total(server.charges)
        assert total_tokens((cost["reported"], cost["estimated"])) == billed, fault
        expected = sum(PRICE.of(total([charge]), charge.tier) for charge in server.charges)  # type: ignore[arg-type]  # tiers are texts here
        assert cost["price"] == pytest.approx(expected)
        assert {charge.tier for charge in server.charges} == {tier and ("priority" if is_openai else "fast")}
