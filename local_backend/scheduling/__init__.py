"""Who goes when: length prediction, static micro-batches, the order of admission, the memory of rows."""
