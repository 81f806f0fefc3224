"""Scheduling: length prediction, the order of admission, preemption, and the memory budget of rows."""
