"""Getting a model into memory: from a folder, the model hub, a GGUF file, or the default one."""
