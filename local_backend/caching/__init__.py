"""KV cache of the batch, and the prefix cache of earlier rows."""
