"""How the router that ships was trained: labelled questions, losses and measures. For maintainers."""
