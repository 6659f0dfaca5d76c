"""A page for exploring conversions: every plan of some meshes, step by step."""
