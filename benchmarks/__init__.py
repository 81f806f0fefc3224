"""One module per claim: ``python -m benchmarks.NAME`` prints a table, then one JSON line."""
