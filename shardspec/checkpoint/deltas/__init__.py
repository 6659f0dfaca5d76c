"""Writes and applies deltas between checkpoints."""
