"""Saves and loads checkpoints in a running job."""
