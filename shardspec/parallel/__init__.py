"""Modules cut by rules, and ready rules for the usual ways to do so."""
