"""``ThoughtGraph``: an answer whose parts and their dependencies the programmer knows.

The parts are written by the same fan-out as the points of a skeleton: each as soon as what it builds on is
written. The idea of a graph that a program gives is that of SGLang (arXiv 2312.07104).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from langchain_core.runnables import Runnable

from sot_chains.answering.answer import Answer
from sot_chains.answering.graph import GraphAnswer
from sot_chains.answering.point_writer import PointDelta
from sot_chains.calls.options import CallOptions
from sot_chains.chain import SkeletonOfThought
from sot_chains.providers import Provider
from sot_chains.text.conversation import Conversation
from sot_chains.text.thoughts import Thought, mermaid, numbered

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph


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

    def to_langgraph(self) -> CompiledStateGraph[Any, Any, Any, Any]:
        """The same thoughts as a LangGraph graph from ``{"question": ...}`` to ``{"texts": {name: text}}``.

        Raises:
            ImportError: LangGraph is not installed.
        """
        from langgraph.graph import END, START, StateGraph

        graph: StateGraph[Any, Any, Any, Any] = StateGraph(_State)
        plain = SkeletonOfThought(self.provider, router=_plainly(), retries=self.method.retries)

        def node_of(thought: Thought) -> Any:
            async def write(state: _State) -> dict[str, Any]:
                texts = {name: state["texts"][name] for name in thought.all_needs}
                message = await plain.ainvoke(thought.request(state["question"], texts))
                return {"texts": {thought.name: message.text}}

            return write

        needed = {name for thought in self.thoughts for name in thought.all_needs}
        for thought in self.thoughts:
            graph.add_node(thought.name, node_of(thought))
            if thought.all_needs:
                graph.add_edge(list(thought.all_needs), thought.name)
            else:
                graph.add_edge(START, thought.name)
            if thought.name not in needed:
                graph.add_edge(thought.name, END)
        return graph.compile()

    @classmethod
    def from_langgraph(
        cls,
        model: str | Runnable[Any, Any] | Provider,
        graph: CompiledStateGraph[Any, Any, Any, Any],
        prompts: Mapping[str, str],
        **options: Any,
    ) -> ThoughtGraph:
        """The thoughts of a LangGraph graph, whose edges say what they build on.

        Args:
            model: As for this class.
            graph: A compiled graph without circles and conditions.
            prompts: The prompt of each node; a node is a Python function, which has none.
            **options: As for this class.

        Raises:
            ValueError: A node has no prompt, an edge is conditional, or there is a circle.
        """
        drawn = graph.get_graph()
        names = [name for name in drawn.nodes if name not in ("__start__", "__end__")]
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


def _merged(texts: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    return {**texts, **more}


class _State(TypedDict):
    """What a LangGraph graph of thoughts hands from node to node."""

    question: str
    texts: Annotated[dict[str, str], _merged]


def _plainly() -> Any:
    from sot_chains.router.rules import PLAINLY  # its package brings NumPy, which an import need not wait for

    return PLAINLY
