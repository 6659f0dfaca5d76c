"""Specs in the notations of other libraries, and back; what cannot be expressed is refused."""
