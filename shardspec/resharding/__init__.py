"""Moves the tensors of state dicts from one sharding to another: plans, name maps, digests."""
