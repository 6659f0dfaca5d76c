"""Writing an output whole or not at all, by one process or by several."""
