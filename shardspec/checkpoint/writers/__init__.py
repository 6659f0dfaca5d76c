"""Checkpoints as others read them: one file of code for each form that can be written."""
