"""The engine behind ``transformers`` generate()."""
