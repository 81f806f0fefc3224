"""The engine as a LangChain chat model."""
