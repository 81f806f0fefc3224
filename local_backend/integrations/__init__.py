"""Adapters of the engine: for LangChain, ``generate`` of ``transformers`` and files of requests."""
