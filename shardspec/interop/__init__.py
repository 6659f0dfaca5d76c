"""Specs in the notations of other libraries, and back; what cannot be expressed is refused."""

from shardspec.renamed import renamed_module

for _former in ("dcp_chunks", "jax_specs", "other_specs", "torch_placements"):
    globals()[_former] = renamed_module(f"{__name__}.{_former}", f"{__name__}.notations")
