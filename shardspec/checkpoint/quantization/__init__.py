"""Quantized weights: schemes, cuts, casts both ways."""
