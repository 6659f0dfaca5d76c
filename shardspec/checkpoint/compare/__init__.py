"""Checkpoints inspected, verified, compared and digested."""
