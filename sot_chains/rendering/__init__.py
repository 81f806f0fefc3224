"""Answers as HTML, for the page of ``sot serve``, a file and notebooks; and the report of an evaluation."""

from sot_chains.rendering.lane import TEMPLATES, Lane, Run, make_lane, render

__all__ = ["TEMPLATES", "Lane", "Run", "make_lane", "render"]
