"""One request: its parameters, its state while it runs, and its outputs."""
