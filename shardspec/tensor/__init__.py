"""Provides `DTensor`, torch's operators on it, and conversions between its layouts."""
