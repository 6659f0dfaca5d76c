"""Measures the seconds of steps on your machines, and fits the speed of links to them."""
