"""Specs in the notations of other libraries, and back; specs without a counterpart are refused."""
