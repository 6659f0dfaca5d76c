"""State dicts as checkpoints see them: flat names, shards of ranks, and their bytes in memory."""
