"""Specs in the language of Shardy, the partitioner of MLIR and JAX, as text.

``#sdy.sharding<@mesh, [{"x"}, {}]>``: per dim the axes that shard it, the major one first; axes
over which a sum is pending are unreduced. See "Sharding Representation" in Shardy's documentation.
"""

from collections.abc import Iterable

from shardspec.errors import LossyConversionError
from shardspec.layout.layout import SpecLike, resolve_axes
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = ["shardy_mesh_text", "shardy_text"]


def shardy_text(spec: SpecLike, mesh: DeviceMesh) -> str:
    """Write a spec as a sharding attribute; every dim is closed.

    Axes without names are called ``axis_0`` and so on, as in `shardy_mesh_text`.

    Raises
    ------
    LossyConversionError
        If another reduction than a sum is pending.
    AxisError
        If the mesh lacks an axis of the spec.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("x", "y"))
    >>> shardy_text("[S(y,x),R]", mesh)
    '#sdy.sharding<@mesh, [{"y", "x"}, {}]>'
    >>> shardy_text("[S(x),R|P(y)]", mesh)
    '#sdy.sharding<@mesh, [{"x"}, {}], unreduced={"y"}>'
    """
    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    resolved.check_plain("Shardy")
    for partial in resolved.partials:
        if partial.op != "sum":
            raise LossyConversionError(
                f"spec {spec}: Shardy has no pending {partial.op}, only sums; finish it first"
            )
    dims = ", ".join(_names(mesh, map(int, dim_spec.axes)) for dim_spec in resolved.dim_specs)
    pending = _names(mesh, (int(partial.axis) for partial in resolved.partials))
    unreduced = f", unreduced={pending}" if resolved.partials else ""
    return f"#sdy.sharding<@mesh, [{dims}]{unreduced}>"


def shardy_mesh_text(mesh: DeviceMesh) -> str:
    """Write the mesh that `shardy_text` names.

    Examples
    --------
    >>> shardy_mesh_text(DeviceMesh(range(4), (2, 2), axis_names=("x", "y")))
    'sdy.mesh @mesh = <["x"=2, "y"=2]>'
    >>> shardy_mesh_text(DeviceMesh([1, 0], (2,)))
    'sdy.mesh @mesh = <["axis_0"=2], device_ids=[1, 0]>'
    """
    axes = ", ".join(f'"{_name(mesh, axis)}"={size}' for axis, size in enumerate(mesh.shape))
    in_order = mesh.ids == tuple(range(mesh.size))
    ids = "" if in_order else f", device_ids=[{', '.join(map(str, mesh.ids))}]"
    return f"sdy.mesh @mesh = <[{axes}]{ids}>"


def _names(mesh: DeviceMesh, axes: Iterable[int]) -> str:
    return "{" + ", ".join(f'"{_name(mesh, axis)}"' for axis in axes) + "}"


def _name(mesh: DeviceMesh, axis: int) -> str:
    return f"axis_{axis}" if mesh.axis_names is None else mesh.axis_names[axis]
