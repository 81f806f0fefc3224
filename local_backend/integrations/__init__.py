"""The engine behind interfaces of others: LangChain, ``generate`` of ``transformers``, files of requests."""
