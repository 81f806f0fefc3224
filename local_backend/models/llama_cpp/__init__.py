"""Forwards computed by llama.cpp, with the weights of a GGUF file as they are, on a CPU."""
