"""One request: what it asks for, its state while it runs, and what comes out."""
