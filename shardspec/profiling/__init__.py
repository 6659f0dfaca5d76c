"""Measures steps on the user's own machines, and fits links to the times."""
