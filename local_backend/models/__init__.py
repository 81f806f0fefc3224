"""Loads models (a folder, the model hub, a GGUF file or the default model) and runs their forwards."""
