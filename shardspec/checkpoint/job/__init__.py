"""Saving and loading in a running job."""
