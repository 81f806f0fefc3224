"""Keys and values of the batch, and what finished rows leave behind for those that begin alike."""
