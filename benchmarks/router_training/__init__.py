"""How the shipped router was trained: labelled questions, losses and measures. For maintainers."""
