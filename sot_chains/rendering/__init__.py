"""Answers as HTML: for the page of ``sot serve``, for the file that shares a run, and for notebooks."""

from sot_chains.rendering.lane import Bar, Block, Lane, Part, make_lane
from sot_chains.rendering.markup import STYLE, Run

__all__ = ["STYLE", "Bar", "Block", "Lane", "Part", "Run", "make_lane"]
