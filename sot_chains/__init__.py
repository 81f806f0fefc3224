"""Skeleton-of-Thought: outline an answer, then write all of its points at once (arXiv 2307.15337)."""
