"""``ThoughtGraph``: an answer whose parts and their dependencies the programmer knows.

The parts are written by the same fan-out as the points of a skeleton: each as soon as what it builds on is
written. The idea of a graph that a program gives is that of SGLang (arXiv 2312.07104).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable

from sot_chains.chain import SkeletonOfThought
from sot_chains.outline.skeleton import Thought, numbered
from sot_chains.providers import Provider


class ThoughtGraph(SkeletonOfThought):
    """Answers by given thoughts, each written as soon as those it builds on are.

    It is called like :class:`~sot_chains.SkeletonOfThought`, with the same limits, failure handling, streams
    and trace. A thought whose call fails is marked in the trace, and so are those that build on it.

    Args:
        model: As for ``SkeletonOfThought``.
        thoughts: The thoughts in reading order, or prompts by name.
        **options: Arguments of ``SkeletonOfThought``, e.g. ``limits``, ``conclusion=True`` for an end.

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
        super().__init__(model, **{"router": "always", **options})
        self.options = replace(self.options, thoughts=self.thoughts)

    def mermaid(self) -> str:
        """The graph as a flowchart, in the language of Mermaid."""
        label = partial(re.sub, r"[\"#&<>\n]", lambda match: f"#{ord(match[0])};")
        nodes = [f'    n{point.number}["{label(point.text)}"]' for point in self.points]
        edges = [f"    n{need} --> n{point.number}" for point in self.points for need in point.needs]
        return "\n".join(["flowchart TD", *nodes, *edges])

    def _repr_markdown_(self) -> str:
        """What Jupyter shows."""
        return f"```mermaid\n{self.mermaid()}\n```"
