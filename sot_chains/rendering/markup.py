"""Runs as HTML, from templates that escape every text and need neither a script nor another file.

There are no style attributes, which the page's policy forbids: bars are SVG, colours are classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from sot_chains.rendering.lane import Lane

TEMPLATES = Path(__file__).with_name("templates")
_environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)


@dataclass(frozen=True)
class Run:
    """Answers to one question by one model, side by side. Jupyter displays it."""

    question: str
    model: str
    lanes: tuple[Lane, ...] = ()

    def _repr_html_(self) -> str:
        return self._rendered("notebook.html")

    def fragment(self) -> str:
        """The answers, a timeline and a table, without their style."""
        return self._rendered("run.html")

    def page(self) -> str:
        """A document of its own, which needs no other file."""
        return self._rendered("page.html")

    def _rendered(self, template: str) -> str:
        longest = max((bar.end for lane in self.lanes for bar in lane.bars), default=0.0)
        return _environment.get_template(template).render(run=self, longest=longest)
