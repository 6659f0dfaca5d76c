"""Where files are: on this machine, or in an object store."""
