"""``ThoughtGraph``: an answer whose parts and their dependencies the programmer knows.

The parts are written by the same fan-out as the points of a skeleton: each as soon as what it builds on is
written. The idea of a graph that a program gives is that of SGLang (arXiv 2312.07104).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from langchain_core.runnables import Runnable, RunnableConfig

from sot_chains.answering.answer import Answer
from sot_chains.answering.graph import GraphAnswer
from sot_chains.answering.point_writer import PointDelta
from sot_chains.calls.options import CallOptions, Policy
from sot_chains.chain import SkeletonOfThought
from sot_chains.outline.skeleton import Point
from sot_chains.outline.thoughts import Thought, mermaid, numbered
from sot_chains.prompts.conversation import Conversation
from sot_chains.providers import Provider
from sot_chains.providers.base import ProviderError

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph


_KEPT = "thought"  # the key of a node's metadata under which a LangGraph graph keeps a thought
_SHORTEST_SECONDS = 0.001  # of a call that begins when the deadline has passed


class ThoughtGraph(SkeletonOfThought):
    """Answers by given thoughts, each written as soon as those it builds on are.

    It is called like :class:`~sot_chains.SkeletonOfThought`, with the same limits, failure handling, streams
    and trace. A thought whose call fails is marked in the trace, and so are those that build on it.

    Args:
        model: As for ``SkeletonOfThought``.
        thoughts: The thoughts in reading order, or prompts by name.
        conclusion: Whether the model concludes with all thoughts in view; ``"first"`` shows that first.
        **options: Further arguments of ``SkeletonOfThought``, e.g. ``limits``, ``on_failure``.

    Raises:
        ValueError: A thought builds on one that does not exist, or on itself through others.

    Example:
        >>> from langchain_core.language_models import FakeListChatModel
        >>> model = FakeListChatModel(responses=["Flour and water.", "Two pounds."])
        >>> graph = ThoughtGraph(model, {
        ...     "Ingredients": "What is needed to answer: {question}",
        ...     "Cost": "What do these cost? {Ingredients}",
        ... })
        >>> print(graph.invoke("How do I bake bread?").text)
        1. **Ingredients**: Flour and water.
        <BLANKLINE>
        2. **Cost**: Two pounds.
    """

    def __init__(
        self,
        model: str | Runnable[Any, Any] | Provider,
        thoughts: Sequence[Thought] | Mapping[str, str],
        **options: Any,
    ) -> None:
        if isinstance(thoughts, Mapping):
            thoughts = [Thought(name=name, prompt=prompt) for name, prompt in thoughts.items()]
        self.thoughts = tuple(thoughts)
        self.points = numbered(self.thoughts)
        super().__init__(model, **{"router": None, **options})

    def _new_answer(
        self,
        conversation: Conversation,
        setting: CallOptions,
        on_arrival: Callable[[PointDelta], None] | None,
    ) -> Answer:
        return GraphAnswer(self.thoughts, self.method, conversation, setting, on_arrival)

    def mermaid(self) -> str:
        """The graph as a flowchart, in the language of Mermaid."""
        return mermaid(self.points)

    def _repr_markdown_(self) -> str:
        """What Jupyter shows."""
        return f"```mermaid\n{self.mermaid()}\n```"

    def to_langgraph(self, config: RunnableConfig | None = None) -> CompiledStateGraph[Any, Any, Any, Any]:
        """The same thoughts as a LangGraph graph from ``{"question": ...}`` to ``{"texts": {name: text}}``.

        Each node keeps the options of this graph: limits, budget, retries, what is done about a failure, and
        the deadline, which counts from the first node on. A thought whose call fails is in ``"failures"``,
        and so are those that build on it; there is no plain answer instead, so that this policy raises. A
        conclusion is a node of its own.

        Args:
            config: Kept with the graph, such as ``{"max_concurrency": 2}`` for the calls in flight.

        Raises:
            ImportError: LangGraph is not installed.
        """
        from langgraph.graph import END, START, StateGraph

        graph: StateGraph[Any, Any, Any, Any] = StateGraph(_State)
        thoughts = list(self.thoughts)
        if self.method.conclusion:
            thoughts.append(self._concluding())
        nodes = {thought.name: _node_name(thought.name) for thought in thoughts}
        needed = {name for thought in thoughts for name in thought.all_needs}
        for thought in thoughts:
            kept = thought.model_dump() if thought in self.thoughts else None
            graph.add_node(nodes[thought.name], self._node(thought), metadata={_KEPT: kept})
            needs = [nodes[name] for name in thought.all_needs]
            graph.add_edge(needs or START, nodes[thought.name])
            if thought.name not in needed:
                graph.add_edge(nodes[thought.name], END)
        compiled = graph.compile()
        return compiled.with_config(config) if config else compiled

    def _concluding(self) -> Thought:
        """The conclusion as a thought that builds on all others."""
        template = self.method.prompts_in_use.templates["en"].conclusion
        prompt = template.format(question="{question}", points="(below)")
        return Thought(
            name="Conclusion", prompt=prompt, needs=tuple(thought.name for thought in self.thoughts)
        )

    def _node(self, thought: Thought) -> Callable[..., Any]:
        """What writes ``thought`` in a LangGraph graph."""

        def policy(point: Point | None, error: Exception) -> Policy:
            chosen = self.method.policy(point, error)
            return "raise" if chosen == "plain" else chosen

        graph = copy(self)  # with the same provider, limits and so on
        graph.method = replace(self.method, conclusion=False, on_failure=policy)

        async def write(state: _State, config: RunnableConfig) -> dict[str, Any]:
            begun, now = state.get("begun_seconds") or time.time(), time.time()
            news: dict[str, Any] = {"begun_seconds": begun}
            texts = state.get("texts") or {}
            if lacking := [name for name in thought.all_needs if name not in texts]:
                return {**news, "failures": {thought.name: f"it builds on {', '.join(lacking)}"}}
            seconds = self.deadline_seconds and max(_SHORTEST_SECONDS, begun + self.deadline_seconds - now)
            asked = thought.request(state["question"], {name: texts[name] for name in thought.all_needs})
            alone = Thought(name=thought.name, prompt=asked.replace("{", "{{").replace("}", "}}"))
            one = copy(graph)
            one.thoughts, one.points = (alone,), numbered([alone])
            try:
                message = await one.ainvoke(state["question"], config, deadline_seconds=seconds)
            except ProviderError as error:
                if policy(Point(1, thought.name), error) == "raise":
                    raise
                return {**news, "failures": {thought.name: str(error)}}
            (point,) = message.response_metadata["sot"]["points"]
            if point["status"] != "complete":
                news["failures"] = {thought.name: point["reason"] or point["status"]}
                if point["finish_reason"] is None:  # it broke off: nothing is written on half of a text
                    return news
            return {**news, "texts": {thought.name: point["text"]}}

        return write

    @classmethod
    def from_langgraph(
        cls,
        model: str | Runnable[Any, Any] | Provider,
        graph: CompiledStateGraph[Any, Any, Any, Any],
        prompts: Mapping[str, str] | None = None,
        **options: Any,
    ) -> ThoughtGraph:
        """The thoughts of a LangGraph graph, whose edges say what they build on.

        Args:
            model: As for this class.
            graph: A compiled graph without circles and conditions.
            prompts: The prompt of each node; a node is a Python function, which has none, except one that
                :meth:`to_langgraph` has made.
            **options: As for this class.

        Raises:
            ValueError: A node has no prompt, an edge is conditional, or there is a circle.
        """
        drawn = graph.get_graph()
        names = [name for name in drawn.nodes if name not in ("__start__", "__end__")]
        kept = [
            (node.metadata or {}).get(_KEPT, _KEPT) for name, node in drawn.nodes.items() if name in names
        ]
        if prompts is None and _KEPT not in kept:
            options = {"conclusion": None in kept, **options}
            return cls(model, [Thought(**thought) for thought in kept if thought is not None], **options)
        prompts = prompts or {}
        if missing := [name for name in names if name not in prompts]:
            raise ValueError(f"prompts has none for the nodes {missing}: give one for each of {names}")
        if conditional := [(edge.source, edge.target) for edge in drawn.edges if edge.conditional]:
            raise ValueError(f"the edges {conditional} are conditional: a graph of thoughts takes them all")
        needs: dict[str, list[str]] = {name: [] for name in names}
        for edge in drawn.edges:
            if edge.source in needs and edge.target in needs:
                needs[edge.target].append(edge.source)
        thoughts = [Thought(name=name, prompt=prompts[name], needs=tuple(needs[name])) for name in names]
        return cls(model, thoughts, **options)


def _earlier(one: float, other: float) -> float:
    return min(one, other) if one and other else one or other


def _merged(texts: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    return {**texts, **more}


class _State(TypedDict):
    """What a LangGraph graph of thoughts hands from node to node."""

    question: str
    texts: Annotated[dict[str, str], _merged]
    failures: Annotated[dict[str, str], _merged]
    begun_seconds: Annotated[float, _earlier]


def _node_name(name: str) -> str:
    """What LangGraph takes for ``name``: it reserves two characters, its own names and those of the state."""
    name = name.replace("|", "/").replace(":", " -")
    return f"{name} " if name in _State.__annotations__ or name.startswith("__") else name
