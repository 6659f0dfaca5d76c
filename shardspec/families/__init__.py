"""Model families: one TOML each says its tensors, from which maps and layouts follow."""
