"""Merges and reshards checkpoints."""
