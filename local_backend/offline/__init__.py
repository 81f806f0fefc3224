"""Batches from and to files, on one machine or on Ray."""
