"""Saves and loads checkpoints in a running job, where each rank has its own shards."""
