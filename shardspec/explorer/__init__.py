"""A page to explore conversions in: every plan of some meshes, to be looked at step by step."""
