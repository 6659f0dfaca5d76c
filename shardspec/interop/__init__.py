"""Converts specs and tensors to and from torch, JAX and Colossal-AI; refuses what these lack."""
