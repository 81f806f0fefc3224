"""Agents with and without points: ten questions to an agent with two tools, five of which need one.

With :class:`~sot_chains.middleware.SkeletonMiddleware` tools are to be called as without it, and the other
answers are to come in points. The default model has not learned to call tools, so there a rule decides it;
``--model`` names one that calls them by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from rich.table import Table

from benchmarks.results import add_save_argument, report
from local_backend import ChatLocal
from sot_chains.middleware import SkeletonMiddleware

_MAX_TOKENS = 256  # of a reply: a small model may repeat itself without end
_PRICES = {"clay": 12, "glaze": 9, "kiln": 950}

FOR_TOOLS = (
    "What is the price of a kiln?",
    "What does clay cost?",
    "Is the glaze expensive?",
    "When is the pottery open on Sunday?",
    "Is the pottery open on Monday?",
)
FOR_POINTS = (
    "What are the benefits of making pottery?",
    "How can I improve my time management skills?",
    "What are some ways to reduce stress at work?",
    "What should I consider before I adopt a dog?",
    "What are the advantages of learning an instrument?",
)


@tool
def find_price(item: Literal["clay", "glaze", "kiln"]) -> str:
    """What something costs in the shop of the pottery."""
    return f"The price of {item} is {_PRICES[item]} euros."


@tool
def find_hours(day: Literal["Monday", "Saturday", "Sunday"]) -> str:
    """When the pottery is open."""
    return f"On {day} the pottery is {'closed' if day == 'Monday' else 'open from ten to six'}."


TOOLS = (find_price, find_hours)


class CallsByRule(ChatLocal):
    """A local model with a rule for the one thing that it has not learned: when to call a tool.

    A question that names a value that a tool takes is a call of that tool. What the tool returns is put to
    the model behind the question. All text is the model's.
    """

    def bind_tools(self, tools: Sequence[Any], **options: Any) -> Runnable[Any, Any]:
        """The model with tools; the rule decides, whatever the ``options``."""
        return self.bind(tools=[convert_to_openai_tool(one) for one in tools])

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        if call := _find_call(messages[-1], kwargs.pop("tools", ())):
            yield call
            return
        async for generated in super()._astream(_with_results(messages), stop, run_manager, **kwargs):
            yield generated

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        if call := _find_call(messages[-1], kwargs.pop("tools", ())):
            yield call
            return
        yield from super()._stream(_with_results(messages), stop, run_manager, **kwargs)

    async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, *args, **kwargs))

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        return generate_from_stream(self._stream(messages, *args, **kwargs))


def _find_call(asked: BaseMessage, tools: Sequence[Any]) -> ChatGenerationChunk | None:
    """The call that a question is, by the values that the tools take."""
    words = re.findall(r"\w+", str(asked.text).casefold()) if asked.type == "human" else ()
    for function in (one["function"] for one in tools):
        for name, field in function["parameters"]["properties"].items():
            for value in field.get("enum", ()):
                if str(value).casefold() in words:
                    arguments = json.dumps({name: value})
                    call: Any = {
                        "name": function["name"],
                        "args": arguments,
                        "id": f"call-{value}",
                        "index": 0,
                    }
                    chunk = AIMessageChunk(content="", tool_call_chunks=[call])
                    chunk.response_metadata = {"finish_reason": "tool_calls"}
                    return ChatGenerationChunk(message=chunk)
    return None


def _with_results(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The messages without calls, each result behind the question that it belongs to."""
    kept: list[BaseMessage] = []
    for message in messages:
        if message.type == "tool":
            kept[-1] = HumanMessage(f"{message.text} {kept[-1].text} Answer in one sentence.")
        elif not getattr(message, "tool_calls", ()):
            kept.append(message)
    return kept


def measure(model: Any, *middleware: Any) -> list[dict[str, Any]]:
    """How an agent on ``model`` answers each question: its calls, its points, and the time it takes."""
    agent: Any = create_agent(model, list(TOOLS), middleware=list(middleware))
    cases = []
    for question in (*FOR_TOOLS, *FOR_POINTS):
        begin = time.perf_counter()
        streamed: dict[str, str] = {}
        messages: list[Any] = []
        for mode, event in agent.stream({"messages": [question]}, stream_mode=["messages", "updates"]):
            if mode == "messages":
                streamed[event[0].id] = streamed.get(event[0].id, "") + event[0].text
            else:
                messages += [one for update in event.values() for one in update["messages"]]
        trace = messages[-1].response_metadata.get("sot") or {"points": ()}
        calls = [(call["name"], call["args"]) for one in messages for call in getattr(one, "tool_calls", ())]
        cases.append(
            {
                "question": question,
                "seconds": time.perf_counter() - begin,
                "calls": calls,
                "num_points": len(trace["points"]),
                "streamed_is_final": streamed == {one.id: one.text for one in messages},
                "text": messages[-1].text,
            }
        )
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("--model", help="a local model that calls tools (the default model, with a rule)")
    add_save_argument(parser)
    given = parser.parse_args(arguments)
    kind = ChatLocal if given.model else CallsByRule
    with kind.from_pretrained(given.model, max_tokens=_MAX_TOKENS) as model:
        plain, points = measure(model), measure(model, SkeletonMiddleware())
    both = list(zip(points, plain, strict=True))
    table = Table(
        "question", "tool", "as without", "points", "seconds", "without", title="An agent's answers"
    )
    for one, other in both:
        calls = ", ".join(name for name, _ in one["calls"]) or "-"
        times = [f"{case['seconds']:.2f}" for case in (one, other)]
        is_same = "yes" if one["calls"] == other["calls"] else "no"
        table.add_row(one["question"], calls, is_same, str(one["num_points"]), *times)
    for_tools, others = points[: len(FOR_TOOLS)], points[len(FOR_TOOLS) :]
    summary = {
        "questions": len(both),
        "same_calls": sum(one["calls"] == other["calls"] for one, other in both),
        "for_tools_with_a_call": sum(bool(one["calls"]) for one in for_tools),
        "others_in_points": sum(one["num_points"] > 1 for one in others),
        "streamed_is_final": sum(one["streamed_is_final"] for one in points),
        "seconds": round(sum(one["seconds"] for one in points), 2),
        "seconds_without": round(sum(one["seconds"] for one in plain), 2),
    }
    report("agents", table, summary, keep=given.save)


if __name__ == "__main__":
    main()
