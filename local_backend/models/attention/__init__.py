"""Attention functions: grouped heads read in place, and long prompts in blocks."""
