"""The outline of an answer: points, how they are read from a reply, what they build on."""
