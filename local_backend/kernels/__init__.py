"""Forward passes and products that are faster than the general ones."""
