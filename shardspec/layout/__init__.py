"""Sharding specs and layouts, and the search for the cheapest conversion between two layouts."""
