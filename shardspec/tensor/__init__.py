"""`DTensor`, torch's operators on it, and the functions that run a plan on its shards."""
