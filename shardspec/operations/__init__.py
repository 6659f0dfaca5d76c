"""torch's operations on cut tensors; layouts propagate by torch's own rules."""
