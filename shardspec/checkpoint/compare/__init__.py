"""Inspects, verifies, compares and digests checkpoints."""
