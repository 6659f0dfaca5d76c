"""What readers of the field's introductions type, one module a section, run in jobs of any size."""
