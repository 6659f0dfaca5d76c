"""Defines sharding specs and layouts, and finds the cheapest conversion between two layouts."""
