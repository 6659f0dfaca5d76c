"""Transports of bytes between the processes of a job: one module each, behind one protocol."""
