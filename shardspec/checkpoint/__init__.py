"""Saves, loads, inspects, merges and reshards checkpoints on disk; imports no torch to read."""
