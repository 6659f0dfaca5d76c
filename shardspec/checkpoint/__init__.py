"""Saves, loads, inspects, merges and reshards checkpoints on disk, mostly without torch."""
