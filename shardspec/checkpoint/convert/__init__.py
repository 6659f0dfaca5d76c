"""Merging and resharding checkpoints."""
