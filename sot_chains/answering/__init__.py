"""The two stages of Skeleton-of-Thought, and what becomes of points on the way."""
