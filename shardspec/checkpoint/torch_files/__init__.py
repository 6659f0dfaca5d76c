"""Reads and writes files of torch without it: zips, and pickles that are never executed."""
