"""Specs, layouts, and the search for the cheapest way between two of them."""
