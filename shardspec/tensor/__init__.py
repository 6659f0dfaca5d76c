"""`DTensor`, torch's operators on it, and what runs a plan on its shards."""
