"""Runs torch's functions on DTensors: on the shards where that is right, else after a gather."""
