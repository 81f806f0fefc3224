"""Stores of passages, and folders of files that are indexed into them."""
