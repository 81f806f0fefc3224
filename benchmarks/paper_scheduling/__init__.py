"""Sequence scheduling as in its paper (arXiv 2305.13144): baselines to compare the engine with."""
