"""Sequences: what is asked for, what is generated, and how it becomes text."""
