"""Deltas between checkpoints."""
