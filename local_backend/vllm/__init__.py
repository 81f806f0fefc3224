"""Reference copy as a proposer of vLLM."""
