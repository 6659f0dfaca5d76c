"""Converts specs to and from the notations of torch, JAX and Colossal-AI.

Only functions with placements of torch import another library. A spec that the other notation
cannot express raises `LossyConversionError`; an axis that the mesh lacks raises `AxisError`.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardspec.comm.steps import ReduceOp
from shardspec.errors import LayoutError, LossyConversionError
from shardspec.layout import placements as own
from shardspec.layout.layout import Layout, OwnSpec, resolve_axes
from shardspec.layout.spec import ShardingSpec, check_plain
from shardspec.mesh.device_mesh import Axis, DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

SpecEntry: TypeAlias = str | tuple[str, ...] | None
"""The entry of a JAX PartitionSpec for one dim."""

_COLOSSAL: Final[tuple[list[int], ...]] = ([], [0], [1], [0, 1])
"""R, S0, S1 and S01: the dim specs of colossalai/tensor/d_tensor/sharding_spec.py."""


def _resolved(
    library: str, spec: OwnSpec, mesh: DeviceMesh, pending_ops: Sequence[ReduceOp] = ("sum",)
) -> ShardingSpec:
    """Return a spec with axes by number, after checking that the library can express it.

    Raises `LossyConversionError` for parts, blocks, and reductions other than `pending_ops`.
    """
    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    check_plain(resolved, library)
    for partial in resolved.partials:
        if partial.op not in pending_ops:
            only = ", only sums" if pending_ops else ""
            raise LossyConversionError(
                f"spec {spec}: {library} has no pending {partial.op}{only}; finish it first"
            )
    return resolved


def to_placements(spec: OwnSpec, mesh: DeviceMesh) -> tuple["Placement", ...]:
    """Return torch's placements for a spec, one per mesh axis.

    Axes that are not in ascending order, and parts of equal size, become a `_StridedShard`. Other
    parts, and blocks, raise `LossyConversionError`.

    Examples
    --------
    >>> to_placements("[S10,R]", DeviceMesh(range(4), (2, 2)))
    (_StridedShard(dim=0, sf=2), Shard(dim=0))
    """
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    def in_torch(placement: own.Placement) -> "Placement":
        match placement:
            case None:
                return Replicate()
            case own.Split(dim, 1):
                return Shard(dim)
            case own.Split(dim, factor):
                return _StridedShard(dim, split_factor=factor)
            case op:
                return Partial("product" if op == "prod" else op)

    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    return tuple(map(in_torch, own.placements_of(resolved, mesh.shape)))


def from_placements(
    placements: Sequence["Placement"], dims: int | Sequence[int], mesh: DeviceMesh
) -> ShardingSpec:
    """Return the spec for torch's placements, one per mesh axis.

    `dims` is the number of dims, or the shape of the tensor; a `_StridedShard` that means parts,
    ``S0{8,8}``, needs the shape. Raises as `spec_of_placements` does, and `LossyConversionError`
    for a masked or scaled partial.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> str(from_placements([Shard(1), Replicate()], 2, DeviceMesh(range(4), (2, 2))))
    '[R,S0]'
    """
    parsed = own.own_placements(placements)
    if parsed is None:
        raise LayoutError(
            f"placements are a {type(placements).__name__}; give a list, one per axis"
        )
    return own.spec_of_placements(parsed, dims, mesh.shape)


def to_partition_spec(
    spec: OwnSpec, mesh: DeviceMesh, global_shape: Sequence[int] | None = None
) -> tuple[tuple[SpecEntry, ...], frozenset[str]]:
    """Return the entries of JAX's PartitionSpec, and its unreduced axes.

    ``PartitionSpec(*entries, unreduced=set(unreduced))`` makes the spec. With a `global_shape`,
    sizes that do not divide raise `LossyConversionError`, because JAX refuses them.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("x", "y"))
    >>> to_partition_spec("[S(y,x),R]", mesh)
    ((('y', 'x'),), frozenset())
    """
    resolved, names = _resolved("JAX", spec, mesh), _jax_names(mesh)
    if global_shape is not None:
        Layout(mesh, resolved, global_shape, "float32")  # raises if the spec does not fit the shape
    entries: list[SpecEntry] = []
    for dim, dim_spec in enumerate(resolved.dim_specs):
        axes = [int(axis) for axis in dim_spec.axes]
        parts = prod(mesh.shape[axis] for axis in axes)
        if global_shape is not None and global_shape[dim] % parts:
            raise LossyConversionError(
                f"JAX refuses to split dim {dim} of size {global_shape[dim]} into {parts} parts; "
                f"pad it to {-(-global_shape[dim] // parts) * parts}"
            )
        named = tuple(names[axis] for axis in axes)
        entries.append(named if len(named) > 1 else named[0] if named else None)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries), frozenset(names[int(p.axis)] for p in resolved.partials)


def from_partition_spec(
    partition_spec: Iterable[object], dims: int, *, unreduced: Iterable[str] = ()
) -> ShardingSpec:
    """Return the spec, with axes by name, for a PartitionSpec of JAX or for its entries.

    `unreduced` are axes with a pending sum, if `partition_spec` has entries only. Raises
    `LayoutError` if there are more entries than dims.

    Examples
    --------
    >>> str(from_partition_spec([("y", "x")], 2))
    '[S(y,x),R]'
    """
    # A PartitionSpec with unreduced axes cannot be iterated over.
    entries = tuple(getattr(partition_spec, "partitions", partition_spec))
    pending = {*unreduced, *getattr(partition_spec, "unreduced", ())}
    if reduced := sorted(getattr(partition_spec, "reduced", ())):
        raise LossyConversionError(
            f"{partition_spec}: a spec cannot say that gradients are unreduced over {reduced}; "
            "remove reduced="
        )
    if len(entries) > dims:
        raise LayoutError(f"{len(entries)} entries {entries} for a tensor of {dims} dims")
    by_dim: dict[int, list[Axis]] = {}
    for dim, entry in enumerate(entries):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        if not all(isinstance(name, str) for name in axes):
            raise LossyConversionError(
                f"entry {entry!r} of dim {dim} is neither an axis name, a tuple of names nor None; "
                "a spec cannot leave a dim open"
            )
        by_dim[dim] = list(axes)
    return ShardingSpec(dims, by_dim, partial=dict.fromkeys(sorted(pending), "sum"))


def from_named_sharding(
    sharding: Any,  # noqa: ANN401  # JAX may be missing, and its types lack the devices of a mesh
    dims: int,
) -> tuple[DeviceMesh, ShardingSpec]:
    """Return the mesh, with JAX's device ids, and the spec of a NamedSharding of JAX.

    ``Layout(*from_named_sharding(a.sharding, a.ndim), a.shape, a.dtype.name)`` is the layout of an
    array ``a``. Raises `MeshError` if an axis name is not an identifier.
    """
    jax_mesh = sharding.mesh
    ids = [int(device.id) for device in jax_mesh.devices.flat]
    mesh = DeviceMesh(ids, jax_mesh.devices.shape, axis_names=tuple(map(str, jax_mesh.axis_names)))
    return mesh, resolve_axes(from_partition_spec(sharding.spec, dims), mesh)


def to_jax_mesh(mesh: DeviceMesh, devices: Iterable[Any]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return devices and axis names for ``jax.sharding.Mesh(*to_jax_mesh(mesh, jax.devices()))``.

    The devices may be in any order; those outside the mesh are ignored.
    """
    by_id = {device.id: device for device in devices}
    missing = [id_ for id_ in mesh.ids if id_ not in by_id]
    if missing:
        raise LossyConversionError(
            f"device {missing[0]} of mesh {mesh} is not one of JAX's devices {sorted(by_id)}; use "
            "their ids in the mesh"
        )
    grid = np.empty(mesh.size(), dtype=object)
    grid[:] = [by_id[id_] for id_ in mesh.ids]
    return grid.reshape(mesh.shape), _jax_names(mesh)


def _jax_names(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.axis_names is None:
        raise LossyConversionError(
            f"JAX knows mesh axes by name, but mesh {mesh} has none; name them, as in x=2,y=2"
        )
    return mesh.axis_names


def to_colossal(spec: OwnSpec, mesh: DeviceMesh) -> dict[int, list[int]]:
    """Return Colossal-AI's ``dim_partition_dict``, from dim to the mesh axes that shard it.

    >>> to_colossal("[S01,R]", DeviceMesh(range(4), (2, 2)))
    {0: [0, 1]}
    """
    resolved = _resolved("Colossal-AI", spec, mesh, pending_ops=())
    by_dim = {d: [int(axis) for axis in axes] for d, axes in resolved.dim_partition_dict.items()}
    for dim, axes in by_dim.items():
        if axes not in _COLOSSAL:
            raise LossyConversionError(
                f"spec {spec}: Colossal-AI knows dims as R, S0, S1 and S01 only, and dim {dim} is "
                f"sharded over axes {axes}"
            )
    return by_dim


def from_colossal(dim_partition_dict: Mapping[int, Sequence[int]], dims: int) -> ShardingSpec:
    """Return the spec for Colossal-AI's ``dim_partition_dict``.

    >>> str(from_colossal({0: [0, 1]}, 2))
    '[S01,R]'
    """
    return ShardingSpec(dims, {dim: list(axes) for dim, axes in dim_partition_dict.items()})
