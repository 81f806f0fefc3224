"""Passage stores, and the indexing of folders into them."""
