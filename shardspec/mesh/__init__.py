"""Defines device meshes (device ids in a grid), and makes the process groups of a job."""
