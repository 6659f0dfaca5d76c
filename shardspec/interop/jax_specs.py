"""Specs as JAX's `PartitionSpec`, and back, without JAX.

JAX shards a dim by named axes, the major one first, as a spec does; so orders are kept. It refuses
sizes that do not divide, and knows one pending reduction, the sum (``unreduced``).
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardspec.comm.steps import ReduceOp
from shardspec.errors import LayoutError, LossyConversionError
from shardspec.interop.other_specs import resolved_for
from shardspec.layout.layout import SpecLike, resolve_axes
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh

__all__ = [
    "Entry",
    "from_named_sharding",
    "from_partition_spec",
    "partition_spec_text",
    "to_jax_mesh",
    "to_partition_spec",
]

Entry: TypeAlias = str | tuple[str, ...] | None
"""What stands in a PartitionSpec for one dim."""


@runtime_checkable
class _PartitionSpec(Protocol):
    """JAX's PartitionSpec; it lists its entries by itself only where nothing is unreduced."""

    @property
    def partitions(self) -> Iterable[object]: ...
    @property
    def unreduced(self) -> Iterable[str]: ...
    @property
    def reduced(self) -> Iterable[str]: ...


def to_partition_spec(
    spec: SpecLike, mesh: DeviceMesh, global_shape: Sequence[int] | None = None
) -> tuple[tuple[Entry, ...], frozenset[str]]:
    """Return the entries of JAX's PartitionSpec, and its unreduced axes.

    ``PartitionSpec(*entries, unreduced=set(unreduced))`` makes it. Whether JAX takes the tensor's
    sizes is looked at where these are given.

    Raises `LossyConversionError` if the axes have no names, another reduction than a sum is
    pending, or a size does not divide; `AxisError` if the mesh lacks an axis of the spec.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("x", "y"))
    >>> to_partition_spec("[S(y,x),R]", mesh)
    ((('y', 'x'),), frozenset())
    >>> to_partition_spec("[S(x),R|P(y)]", mesh)
    (('x',), frozenset({'y'}))
    """
    resolved = resolved_for("JAX", spec, mesh)
    names = _names_of(mesh)
    by_dim = [tuple(map(int, dim_spec.axes)) for dim_spec in resolved.dim_specs]
    if global_shape is not None and len(global_shape) != len(by_dim):
        raise LayoutError(
            f"spec {spec} is for {len(by_dim)} dims, but shape {tuple(global_shape)} has "
            f"{len(global_shape)}"
        )
    for dim, (size, axes) in enumerate(zip(global_shape or (), by_dim, strict=False)):
        parts = prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise LossyConversionError(
                f"JAX refuses to split dim {dim} of size {size} into {parts} parts; pad it to "
                f"{-(-size // parts) * parts}"
            )
    entries: list[Entry] = []
    for axes in by_dim:
        named = tuple(names[axis] for axis in axes)
        entries.append(named if len(named) > 1 else named[0] if named else None)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries), frozenset(names[int(p.axis)] for p in resolved.partials)


def from_partition_spec(
    partition_spec: _PartitionSpec | Iterable[object], dims: int, *, unreduced: Iterable[str] = ()
) -> ShardingSpec:
    """Return the spec that a PartitionSpec of JAX, or its entries, describes, its axes by name.

    JAX leaves out dims at the end that are replicated. `unreduced` are axes over which a sum is
    pending, where these are not part of `partition_spec`.

    Raises `LayoutError` if there are more entries than dims; `LossyConversionError` if an entry
    leaves a dim to the compiler, or something is said of gradients (``reduced``).

    Examples
    --------
    >>> str(from_partition_spec([("y", "x")], 2))
    '[S(y,x),R]'
    >>> str(from_partition_spec(["x"], 2, unreduced={"y"}))
    '[S(x),R|P(y)]'
    """
    pending = list(unreduced)
    if isinstance(partition_spec, _PartitionSpec):
        entries = list(partition_spec.partitions)
        pending += partition_spec.unreduced
        if reduced := sorted(partition_spec.reduced):
            raise LossyConversionError(
                f"{partition_spec}: a spec cannot say that gradients are unreduced over {reduced}; "
                "leave out reduced="
            )
    else:
        entries = list(partition_spec)
    if len(entries) > dims:
        raise LayoutError(f"{len(entries)} entries {tuple(entries)} for a tensor of {dims} dims")
    by_dim: dict[int, list[Axis]] = {}
    for dim, entry in enumerate(entries):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        if not all(isinstance(name, str) for name in axes):
            raise LossyConversionError(
                f"entry {entry!r} of dim {dim} names no mesh axes; a spec says of every dim how it "
                "is sharded"
            )
        by_dim[dim] = list(axes)
    partial: dict[Axis, ReduceOp] = dict.fromkeys(sorted(pending), "sum")
    return ShardingSpec(dims, by_dim, partial=partial)


def from_named_sharding(
    sharding: Any,  # noqa: ANN401  # JAX is not there, and declares a mesh without devices
    dims: int,
) -> tuple[DeviceMesh, ShardingSpec]:
    """Return the mesh and the spec that a NamedSharding of JAX describes; ids are JAX's own.

    Raises as `from_partition_spec` does, and `MeshError` if an axis has a name that is no
    identifier. So ``Layout(*from_named_sharding(a.sharding, a.ndim), a.shape, a.dtype.name)`` is
    the layout of an array ``a``.
    """
    found = sharding.mesh
    ids = [int(device.id) for device in found.devices.flat]
    mesh = DeviceMesh(ids, found.devices.shape, axis_names=tuple(map(str, found.axis_names)))
    return mesh, resolve_axes(from_partition_spec(sharding.spec, dims), mesh)


def to_jax_mesh(mesh: DeviceMesh, devices: Iterable[Any]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the array of devices and the names that JAX's Mesh is made of.

    ``jax.sharding.Mesh(*to_jax_mesh(mesh, jax.devices()))`` makes it. Of the devices, in any order,
    those whose ids the mesh has are taken.

    Raises `LossyConversionError` if the axes have no names, or a device is missing.
    """
    by_id = {device.id: device for device in devices}
    missing = [id_ for id_ in mesh.ids if id_ not in by_id]
    if missing:
        raise LossyConversionError(
            f"device {missing[0]} of mesh {mesh} is none of JAX's devices {sorted(by_id)}; use "
            "their ids in the mesh"
        )
    grid = np.empty(mesh.size, dtype=object)
    grid[:] = [by_id[id_] for id_ in mesh.ids]
    return grid.reshape(mesh.shape), _names_of(mesh)


def partition_spec_text(
    spec: SpecLike, mesh: DeviceMesh, global_shape: Sequence[int] | None = None
) -> str:
    """Write JAX's PartitionSpec as it is written in Python; raises as `to_partition_spec` does.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("x", "y"))
    >>> partition_spec_text("[R,S(y,x)]", mesh), partition_spec_text("[S(x)|P(y)]", mesh)
    ("P(None, ('y', 'x'))", "P('x', unreduced={'y'})")
    """
    entries, unreduced = to_partition_spec(spec, mesh, global_shape)
    # A trailing comma inside a lone tuple is Python's own: P(('y', 'x')) has one entry.
    words = [repr(entry) for entry in entries]
    if unreduced:
        words.append(f"unreduced={{{', '.join(map(repr, sorted(unreduced)))}}}")
    return f"P({', '.join(words)})"


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.axis_names is None:
        raise LossyConversionError(
            f"JAX knows mesh axes by name, but mesh {mesh} has none; name them, as in x=2,y=2"
        )
    return mesh.axis_names
