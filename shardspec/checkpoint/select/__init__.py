"""Tensors and names that a conversion takes."""
