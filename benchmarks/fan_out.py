"""Overhead of orchestration: one outline and eight points, with completions that take a fixed time.

There is no server and no network: a completion is a pause. The ideal is two pauses, one for the outline and
one for all points at once; any further time is the method's overhead. The cases are one question and 200 at
once, with calls of 50 ms and of 1 s. The methods alternate, and medians over the rounds are reported. Objects
created by imports are first frozen for the garbage collector, as long-running services do.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import operator
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, TypedDict

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    UsageMetadataCallbackHandler,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableParallel
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.results import save
from sot_chains import SkeletonOfThought
from sot_chains.providers import Delta, VendorProvider

_NUM_POINTS = 8
_OUTLINE = "\n".join(f"{number}. Point number {number}" for number in range(1, _NUM_POINTS + 1))
_TEXT = "It is so, and here is in one sentence why it is so."
_QUESTION = "How do I get more done in a day?"
_USAGE = UsageMetadata(input_tokens=100, output_tokens=12, total_tokens=112)
_CASES = {"1x50ms": (1, 0.05), "1x1s": (1, 1.0), "200x50ms": (200, 0.05), "200x1s": (200, 1.0)}
# Prompts of LangChain's own methods; ours sends what SkeletonOfThought always does.
_ASK_OUTLINE = ChatPromptTemplate.from_messages([("user", "Give an outline of an answer to: {question}")])
_ASK_POINT = ChatPromptTemplate.from_messages([("user", "Question: {question}\nWrite point {point}")])

Method = Callable[[int, float], Awaitable[int]]


def _reply_to(messages: Sequence[BaseMessage]) -> str:
    text = str(messages[-1].content).lower()
    return _OUTLINE if "outline" in text and "point is" not in text else _TEXT


def _labels(outline: str) -> list[str]:
    return [line.partition(". ")[2] for line in outline.splitlines()]


class PacedProvider(VendorProvider):
    """A vendor's provider without the vendor: a completion is a pause."""

    vendor = "paced"

    def __init__(self, seconds: float) -> None:
        super().__init__("paced", base_url="http://paced", api_key=None, prefill=False)
        self._seconds = seconds

    @property
    def is_elsewhere(self) -> bool:
        """It counts as the vendor's own server, whose models get no examples."""
        return False

    async def _deltas(
        self, messages: Sequence[BaseMessage], parameters: dict[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(self._seconds)
        yield Delta(_reply_to(messages), _USAGE, "stop", {"model_name": "paced"})


class PacedChatModel(BaseChatModel):
    """A chat model without a model: a completion is a pause."""

    seconds: float

    @property
    def _llm_type(self) -> str:
        return "paced"

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        await asyncio.sleep(self.seconds)
        message = AIMessage(content=_reply_to(messages), usage_metadata=_USAGE)
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        await asyncio.sleep(self.seconds)
        chunk = AIMessageChunk(content=_reply_to(messages), usage_metadata=_USAGE, chunk_position="last")
        yield ChatGenerationChunk(message=chunk)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        raise NotImplementedError("this benchmark is asynchronous")


# --- the methods; each answers ``num`` questions at once and returns how many points it wrote


async def _all(num: int, answer: Callable[[], Awaitable[int]]) -> int:
    return sum(await asyncio.gather(*(answer() for _ in range(num))))


async def _by_sot(sot: SkeletonOfThought, num: int, config: RunnableConfig | None = None) -> int:
    async def answer() -> int:
        message = await sot.ainvoke(_QUESTION, config)
        return len(message.response_metadata["sot"]["points"])

    return await _all(num, answer)


async def sot_chains(num: int, seconds: float) -> int:
    """Ours, over a provider."""
    return await _by_sot(SkeletonOfThought(PacedProvider(seconds), router="always"), num)


async def sot_chains_callbacks(num: int, seconds: float) -> int:
    """Ours, over a provider, with LangChain's usage callback attached."""
    handler = UsageMetadataCallbackHandler()
    num_points = await _by_sot(
        SkeletonOfThought(PacedProvider(seconds), router="always"), num, {"callbacks": [handler]}
    )
    counted = handler.usage_metadata["paced"]["total_tokens"]
    assert counted == num * (_NUM_POINTS + 1) * _USAGE["total_tokens"], counted
    return num_points


async def sot_chains_chat_model(num: int, seconds: float) -> int:
    """Ours, over a LangChain chat model."""
    return await _by_sot(SkeletonOfThought(PacedChatModel(seconds=seconds), router="always"), num)


async def raw_asyncio(num: int, seconds: float) -> int:
    """Nothing but coroutines."""

    async def complete(reply: str) -> str:
        await asyncio.sleep(seconds)
        return reply

    async def answer() -> int:
        labels = _labels(await complete(_OUTLINE))
        return len(await asyncio.gather(*(complete(_TEXT) for _ in labels)))

    return await _all(num, answer)


async def abatch(num: int, seconds: float) -> int:
    """A chat model's ``ainvoke`` and then its ``abatch``."""
    model = PacedChatModel(seconds=seconds)

    async def answer() -> int:
        outline = await model.ainvoke(_ASK_OUTLINE.invoke({"question": _QUESTION}))
        prompts = [
            _ASK_POINT.invoke({"question": _QUESTION, "point": label}) for label in _labels(outline.text)
        ]
        return len(await model.abatch(list(prompts)))

    return await _all(num, answer)


async def lcel_map(num: int, seconds: float) -> int:
    """An LCEL pipeline with ``.map()``."""
    model = PacedChatModel(seconds=seconds)
    split: Runnable[str, list[dict[str, str]]] = RunnableLambda(
        lambda outline: [{"question": _QUESTION, "point": label} for label in _labels(outline)]
    )
    expand = _ASK_POINT | model | StrOutputParser()
    chain = _ASK_OUTLINE | model | StrOutputParser() | split | expand.map()

    async def answer() -> int:
        return len(await chain.ainvoke({"question": _QUESTION}))

    return await _all(num, answer)


async def runnable_parallel(num: int, seconds: float) -> int:
    """An LCEL pipeline with a ``RunnableParallel`` of eight branches."""
    model = PacedChatModel(seconds=seconds)

    def branch(place: int) -> Any:
        pick: Runnable[str, dict[str, str]] = RunnableLambda(
            lambda outline: {"question": _QUESTION, "point": _labels(outline)[place]}, name=f"pick_{place}"
        )
        return pick | _ASK_POINT | model | StrOutputParser()

    branches = RunnableParallel({f"point_{place}": branch(place) for place in range(_NUM_POINTS)})
    chain = _ASK_OUTLINE | model | StrOutputParser() | branches

    async def answer() -> int:
        return len(await chain.ainvoke({"question": _QUESTION}))

    return await _all(num, answer)


class _State(TypedDict):
    question: str
    labels: list[str]
    texts: Annotated[list[str], operator.add]


async def langgraph_send(num: int, seconds: float) -> int:
    """A LangGraph graph that sends each point to a node."""
    model = PacedChatModel(seconds=seconds)

    async def outline(state: _State) -> dict[str, Any]:
        reply = await model.ainvoke(_ASK_OUTLINE.invoke({"question": state["question"]}))
        return {"labels": _labels(reply.text)}

    async def expand(state: dict[str, str]) -> dict[str, Any]:
        return {"texts": [(await model.ainvoke(_ASK_POINT.invoke(state))).text]}

    def spread(state: _State) -> list[Send]:
        return [Send("expand", {"question": _QUESTION, "point": label}) for label in state["labels"]]

    builder: Any = StateGraph(_State)
    builder.add_node("outline", outline)
    builder.add_node("expand", expand)
    builder.add_edge(START, "outline")
    builder.add_conditional_edges("outline", spread, ["expand"])
    builder.add_edge("expand", END)
    graph = builder.compile()

    async def answer() -> int:
        return len((await graph.ainvoke({"question": _QUESTION, "labels": [], "texts": []}))["texts"])

    return await _all(num, answer)


METHODS: dict[str, Method] = {
    method.__name__: method
    for method in (
        sot_chains,
        sot_chains_chat_model,
        sot_chains_callbacks,
        raw_asyncio,
        abatch,
        lcel_map,
        runnable_parallel,
        langgraph_send,
    )
}


async def measure(case: str, methods: Sequence[str], *, repeats: int) -> dict[str, list[float]]:
    """The time of every repetition over the ideal, by method. The methods alternate."""
    num, seconds = _CASES[case]
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for name in methods:  # imports, compiled patterns, caches
        await METHODS[name](1, 0.001)
    for repeat in range(repeats):
        for place in range(len(methods)):
            name = methods[(place + repeat) % len(methods)]
            gc.collect()
            begin = time.perf_counter()
            num_points = await METHODS[name](num, seconds)
            ratios[name].append((time.perf_counter() - begin) / (2 * seconds))
            if num_points != num * _NUM_POINTS:
                raise AssertionError(f"{name} wrote {num_points} points, expected {num * _NUM_POINTS}")
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fan_out", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(_CASES), choices=list(_CASES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the median is reported")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    gc.collect()
    gc.freeze()
    rounds = {
        case: asyncio.run(measure(case, options.methods, repeats=options.repeats))
        for case in track(options.cases, "Measuring", console=Console(stderr=True))
    }
    gc.unfreeze()
    ratios = {
        method: {case: round(statistics.median(rounds[case][method]), 3) for case in options.cases}
        for method in options.methods
    }
    table = Table("over the ideal", *options.cases)
    for method, by_case in ratios.items():
        table.add_row(method, *(f"{by_case[case]:.3f}" for case in options.cases))
    Console(width=100).print(table)
    summary = {"ideal_ratio": ratios}
    if options.save:
        save("fan_out", summary, [{"case": case, "ratios": by_method} for case, by_method in rounds.items()])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
