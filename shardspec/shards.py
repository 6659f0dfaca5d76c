"""Shards against the layout that they are to follow."""

from collections.abc import Mapping
from typing import TypeAlias

import torch

from shardspec.boxes import slices_within
from shardspec.dtypes import dtype_name
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = ["Facts", "added_up", "check_shards", "facts_of", "index_of"]

Facts: TypeAlias = tuple[tuple[int, ...], str]
"""Shape and dtype of a shard."""


def facts_of(shard: torch.Tensor) -> Facts:
    """Return a shard's shape and the name of its dtype."""
    return tuple(shard.shape), dtype_name(shard.dtype)


def index_of(layout: Layout, device: int) -> tuple[slice, ...]:
    """Return the index that selects a device's box from the whole tensor."""
    whole = tuple((0, size) for size in layout.global_shape)
    return slices_within(layout.box(device), whole)


def check_shards(layout: Layout, facts: Mapping[int, Facts | None]) -> None:
    """Raise `LayoutError` if a shard is missing, or its shape or dtype is not the layout's."""
    for device, found in facts.items():
        wanted = (layout.local_shape(device), layout.dtype)
        if found is None:
            raise LayoutError(f"the shard of device {device} is missing for {layout}")
        if found != wanted:
            raise LayoutError(
                f"device {device} has a shard of shape {found[0]} and dtype {found[1]}, but under "
                f"{layout} it holds shape {wanted[0]} and dtype {wanted[1]}; correct the shard, "
                "the spec or global_shape"
            )


def added_up(mesh: DeviceMesh, spec: ShardingSpec, facts: Mapping[int, Facts]) -> tuple[int, ...]:
    """Return the global shape whose parts, along the axes that cut a dim, are the given shards."""
    first = mesh.ids[0]
    for device in mesh.ids:
        if len(facts[device][0]) != spec.dims:
            raise LayoutError(
                f"device {device} has a shard of shape {facts[device][0]}, but spec {spec} is for "
                f"{spec.dims} dims"
            )
    return tuple(
        sum(facts[device][0][dim] for device in mesh.group(first, cut.axes))
        for dim, cut in enumerate(spec.dim_specs)
    )
