"""Forward passes written in few operations, for models whose layers are known."""
