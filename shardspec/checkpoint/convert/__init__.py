"""Merges sharded checkpoints into whole tensors, or reshards them for another mesh."""
