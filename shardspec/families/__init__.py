"""Model families: a TOML per family lists its tensors; maps and layouts are computed from it."""
