"""Modules sharded by rules, and ready-made rules for common parallelisms."""
