"""Converts state dicts to the flat names, shards and bytes that checkpoints store."""
