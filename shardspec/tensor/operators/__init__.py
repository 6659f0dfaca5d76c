"""torch's operations on DTensors; layouts propagate by torch's own rules."""
