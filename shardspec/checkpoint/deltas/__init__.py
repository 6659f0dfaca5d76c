"""Writes and applies deltas: files with the changes from one checkpoint to the next."""
