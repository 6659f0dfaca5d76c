"""Boxes of stored tensors: coverage, copies, arithmetic."""
