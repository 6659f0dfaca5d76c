"""`DTensor`, torch's operators on it, and the functions that convert its shards."""
