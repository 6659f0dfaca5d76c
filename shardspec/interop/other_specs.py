"""Specs in the words of Shardy, OneFlow and Colossal-AI."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shardspec.errors import LossyConversionError
from shardspec.layout.layout import SpecLike, resolve_axes
from shardspec.layout.placements import PartialPlacement, Split, placements_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh

__all__ = [
    "from_colossal",
    "sbp_text",
    "shardy_mesh_text",
    "shardy_text",
    "to_colossal",
]

_COLOSSAL: Final[tuple[list[int], ...]] = ([], [0], [1], [0, 1])
"""R, S0, S1 and S01: its tables of distances (colossalai/tensor/d_tensor/sharding_spec.py) know no
other."""


def resolved_for(library: str, spec: SpecLike, mesh: DeviceMesh) -> ShardingSpec:
    """Return a spec with axes by number; refuse what only shardspec can say, and all but sums."""
    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    resolved.check_plain(library)
    for partial in resolved.partials:
        if partial.op != "sum":
            raise LossyConversionError(
                f"spec {spec}: {library} has no pending {partial.op}, only sums; finish it first"
            )
    return resolved


def shardy_text(spec: SpecLike, mesh: DeviceMesh) -> str:
    """Write a spec as a sharding attribute of Shardy, the partitioner of MLIR; all dims are closed.

    Axes without names are called ``axis_0`` and so on, as in `shardy_mesh_text`.

    Raises `LossyConversionError` if another reduction than a sum is pending; `AxisError` if the
    mesh lacks an axis of the spec.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("x", "y"))
    >>> shardy_text("[S(y,x),R]", mesh)
    '#sdy.sharding<@mesh, [{"y", "x"}, {}]>'
    >>> shardy_text("[S(x),R|P(y)]", mesh)
    '#sdy.sharding<@mesh, [{"x"}, {}], unreduced={"y"}>'
    """
    resolved = resolved_for("Shardy", spec, mesh)

    def named(axes: Iterable[Axis]) -> str:
        return "{" + ", ".join(f'"{_shardy_axis(mesh, int(axis))}"' for axis in axes) + "}"

    dims = ", ".join(named(dim_spec.axes) for dim_spec in resolved.dim_specs)
    pending = [partial.axis for partial in resolved.partials]
    unreduced = f", unreduced={named(pending)}" if pending else ""
    return f"#sdy.sharding<@mesh, [{dims}]{unreduced}>"


def shardy_mesh_text(mesh: DeviceMesh) -> str:
    """Write the mesh that `shardy_text` names.

    Examples
    --------
    >>> shardy_mesh_text(DeviceMesh([1, 0], (2,)))
    'sdy.mesh @mesh = <["axis_0"=2], device_ids=[1, 0]>'
    """
    sizes = enumerate(mesh.shape)
    axes = ", ".join(f'"{_shardy_axis(mesh, axis)}"={size}' for axis, size in sizes)
    in_order = mesh.ids == tuple(range(mesh.size))
    ids = "" if in_order else f", device_ids=[{', '.join(map(str, mesh.ids))}]"
    return f"sdy.mesh @mesh = <[{axes}]{ids}>"


def _shardy_axis(mesh: DeviceMesh, axis: int) -> str:
    return f"axis_{axis}" if mesh.axis_names is None else mesh.axis_names[axis]


def sbp_text(spec: SpecLike, mesh: DeviceMesh) -> str:
    """Write a spec as an SBP signature of OneFlow: per mesh axis ``S(dim)``, ``B`` or ``P``.

    Raises `LossyConversionError` if the axes of a dim are in another order than from left to right,
    or another reduction than a sum is pending; `AxisError` if the mesh lacks an axis of the spec.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2))
    >>> sbp_text("[S0,R]", mesh), sbp_text("[S0,R|P1]", mesh)
    ('(S(0),B)', '(S(0),P)')
    """
    resolved = resolved_for("OneFlow", spec, mesh)
    for dim, axes in resolved.dim_partition_dict.items():
        if axes != sorted(axes, key=int):
            raise LossyConversionError(
                f"spec {spec}: OneFlow splits dim {dim} over axes {sorted(axes, key=int)} from "
                f"left to right only, not over {axes}"
            )
    words = (
        f"S({placement.dim})"
        if isinstance(placement, Split)
        else "P"
        if isinstance(placement, PartialPlacement)
        else "B"
        for placement in placements_of(resolved, mesh.shape)
    )
    return f"({','.join(words)})"


def to_colossal(spec: SpecLike, mesh: DeviceMesh) -> dict[int, list[int]]:
    """Return Colossal-AI's ``dim_partition_dict``, from dim to the mesh axes that shard it.

    Raises `LossyConversionError` if a dim is sharded otherwise than as R, S0, S1 or S01, or a
    reduction is pending; `AxisError` if the mesh lacks an axis of the spec.

    Examples
    --------
    >>> to_colossal("[S01,R]", DeviceMesh(range(4), (2, 2)))
    {0: [0, 1]}
    """
    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    resolved.check_plain("Colossal-AI")
    if resolved.partials:
        raise LossyConversionError(
            f"spec {spec}: Colossal-AI has no pending reductions in a spec; finish them first"
        )
    by_dim = {d: [int(axis) for axis in axes] for d, axes in resolved.dim_partition_dict.items()}
    for dim, axes in by_dim.items():
        if axes not in _COLOSSAL:
            raise LossyConversionError(
                f"spec {spec}: Colossal-AI knows dims as R, S0, S1 and S01 only, and dim {dim} is "
                f"sharded over axes {axes}"
            )
    return by_dim


def from_colossal(dim_partition_dict: Mapping[int, Sequence[int]], dims: int) -> ShardingSpec:
    """Return the spec that Colossal-AI's dict from dim to mesh axes, major first, describes.

    A dim that does not exist, or an axis used twice, is an `AxisError`.
    """
    by_dim: dict[int, list[Axis]] = {dim: list(axes) for dim, axes in dim_partition_dict.items()}
    return ShardingSpec(dims, by_dim)
