"""Answers as HTML: for the page of ``sot serve``, for the file that shares a run, and for notebooks."""

from sot_chains.rendering.lane import TEMPLATES, Lane, Run, make_lane

__all__ = ["TEMPLATES", "Lane", "Run", "make_lane"]
