"""Moves data between devices: collective steps, their prices, and communicators that run them."""
