"""Bad input and faults, row by row: `python -m tests.faults --whole` counts them all.

A row is a function that yields cases; a case raises AssertionError where the library does wrong.
Each row runs in a process of its own, without torch unless it says so, and every case is held to a
time and a memory limit. pytest runs a short form of each row.
"""
