"""Citations: how texts are compared, and which passages of the documents an answer repeats."""
