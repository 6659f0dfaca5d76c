"""`DeviceMesh`, the ids of its devices, and the process groups of a job over it."""
