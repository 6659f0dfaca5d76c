"""Model families: one TOML each lists the tensors; maps and layouts follow from it."""
