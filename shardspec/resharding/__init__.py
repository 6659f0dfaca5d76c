"""Reshards state dicts from one set of layouts to another; see `shardspec.resharding.plan`."""
