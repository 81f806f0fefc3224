"""Sequence scheduling as its paper has it (arXiv 2305.13144): baselines to compare the engine with."""
