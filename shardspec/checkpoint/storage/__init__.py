"""Files of checkpoints, here and in object stores."""
