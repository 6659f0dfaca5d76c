"""Checkpoints as others write them: one file of code for each format that can be read."""
