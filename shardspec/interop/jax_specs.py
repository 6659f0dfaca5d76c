"""Specs as JAX's `PartitionSpec`, and back, without JAX.

JAX cuts a dim by named axes, the major one first, as a spec does; so orders are kept. It refuses
sizes that do not divide, and knows one pending reduction, the sum (``unreduced``). See
``jax.sharding.PartitionSpec`` and ``NamedSharding.shard_shape`` in JAX 0.10.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Protocol, TypeAlias, runtime_checkable

from shardspec.comm.steps import ReduceOp
from shardspec.errors import LayoutError, LossyConversionError
from shardspec.layout.layout import SpecLike, resolve_axes
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh

__all__ = ["Entry", "from_partition_spec", "partition_spec_text", "to_partition_spec"]

Entry: TypeAlias = str | tuple[str, ...] | None
"""What stands in a PartitionSpec for one dim."""


@runtime_checkable
class _HasUnreduced(Protocol):
    """What JAX's PartitionSpec has beside its entries."""

    @property
    def unreduced(self) -> Iterable[str]: ...


def to_partition_spec(
    spec: SpecLike, mesh: DeviceMesh, global_shape: Sequence[int] | None = None
) -> tuple[tuple[Entry, ...], frozenset[str]]:
    """Return the entries of JAX's PartitionSpec, and its unreduced axes.

    ``PartitionSpec(*entries, unreduced=set(unreduced))`` makes it.

    Parameters
    ----------
    spec, mesh
        What to say, and the mesh it is for; its axes have names.
    global_shape
        The tensor's sizes, to find out whether JAX takes them; left out, they are not looked at.

    Raises
    ------
    LossyConversionError
        If the axes have no names, another reduction than a sum is pending, or a size does not
        divide.
    AxisError
        If the mesh lacks an axis of the spec.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("x", "y"))
    >>> to_partition_spec("[S(y,x),R]", mesh)
    ((('y', 'x'),), frozenset())
    >>> to_partition_spec("[S(x),R|P(y)]", mesh)
    (('x',), frozenset({'y'}))
    """
    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    names = mesh.axis_names
    if names is None:
        raise LossyConversionError(
            f"JAX knows mesh axes by name, but mesh {mesh} has none; name them, as in x=2,y=2"
        )
    for partial in resolved.partials:
        if partial.op != "sum":
            raise LossyConversionError(
                f"spec {spec}: JAX has no pending {partial.op}, only sums; finish it first"
            )
    cuts = [[int(axis) for axis in cut.axes] for cut in resolved.dim_specs]
    if global_shape is not None:
        if len(global_shape) != len(cuts):
            raise LayoutError(
                f"spec {spec} is for {len(cuts)} dims, but shape {tuple(global_shape)} has "
                f"{len(global_shape)}"
            )
        for dim, (size, axes) in enumerate(zip(global_shape, cuts, strict=True)):
            parts = prod(mesh.shape[axis] for axis in axes)
            if size % parts:
                raise LossyConversionError(
                    f"JAX refuses to cut dim {dim} of size {size} into {parts} parts; pad it to "
                    f"{-(-size // parts) * parts}"
                )
    entries: list[Entry] = []
    for axes in cuts:
        named = tuple(names[axis] for axis in axes)
        entries.append(named if len(named) > 1 else named[0] if named else None)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries), frozenset(names[int(p.axis)] for p in resolved.partials)


def from_partition_spec(
    partition_spec: Iterable[object], dims: int, *, unreduced: Iterable[str] = ()
) -> ShardingSpec:
    """Return the spec that a PartitionSpec describes, its axes by name.

    Parameters
    ----------
    partition_spec
        JAX's own, or its entries.
    dims
        Dims of the tensor; JAX leaves out those at the end that are whole.
    unreduced
        Axes over which a sum is pending, where these are not part of `partition_spec`.

    Raises
    ------
    LayoutError
        If there are more entries than dims.
    LossyConversionError
        If an entry leaves a dim to the compiler.

    Examples
    --------
    >>> str(from_partition_spec([("y", "x")], 2))
    '[S(y,x),R]'
    >>> str(from_partition_spec(["x"], 2, unreduced={"y"}))
    '[S(x),R|P(y)]'
    """
    entries = list(partition_spec)
    if len(entries) > dims:
        raise LayoutError(f"{len(entries)} entries {tuple(entries)} for a tensor of {dims} dims")
    cuts: dict[int, list[Axis]] = {}
    for dim, entry in enumerate(entries):
        match entry:
            case None | ():
                pass
            case str(name):
                cuts[dim] = [name]
            case tuple(axes) if all(isinstance(name, str) for name in axes):
                cuts[dim] = list(axes)
            case _:
                raise LossyConversionError(
                    f"entry {entry!r} of dim {dim} names no mesh axes; a spec says of every dim "
                    "how it is cut"
                )
    pending = list(unreduced)
    if isinstance(partition_spec, _HasUnreduced):
        pending += partition_spec.unreduced
    partial: dict[Axis, ReduceOp] = dict.fromkeys(sorted(pending), "sum")
    return ShardingSpec(dims, cuts, partial=partial)


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
