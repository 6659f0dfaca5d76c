"""Rewrites layouts on several meshes of the same devices, such as 2x2 and 4x1, for one mesh."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise, permutations
from operator import mul

from shardspec.comm.steps import ReduceOp
from shardspec.layout.layout import Layout
from shardspec.layout.spec import DimSpec, ShardingSpec
from shardspec.mesh.device_mesh import Axis, DeviceMesh


def on_common_mesh(layouts: Mapping[str, Layout]) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return a mesh of all devices, and the layouts rewritten for it with the same boxes.

    Meshes 2x2 and 4x1 give 2x2; 2x3 and 3x2 have no common mesh. Then, or if meshes have different
    devices, the layouts are returned unchanged. Pending reductions are dropped.

    Examples
    --------
    >>> dense = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    >>> experts = DeviceMesh(range(4), (4, 1), axis_names=("ep", "etp"))
    >>> w, e = Layout(dense, "[S(tp)]", (8,), "f32"), Layout(experts, "[S(ep)]", (8,), "f32")
    >>> mesh, moved = on_common_mesh({"w": w, "e": e})
    >>> mesh.axis_names, str(moved["w"].labelled_spec), str(moved["e"].labelled_spec)
    (('dp_ep', 'tp_ep'), '[S(tp_ep)]', '[S(dp_ep,tp_ep)]')
    """
    meshes = list(dict.fromkeys(layout.mesh for layout in layouts.values()))
    ids = list(dict.fromkeys(device for mesh in meshes for device in mesh.ids))
    # Distances in ids between neighbors along an axis, over all axes, ascending.
    cuts = sorted({1, *(step for mesh in meshes for step in _steps(mesh))})
    nested = all(wide % narrow == 0 for narrow, wide in pairwise(cuts))
    if not nested or any(list(mesh.ids) != ids for mesh in meshes):
        return DeviceMesh(ids, (len(ids),)), dict(layouts)
    fine = list(pairwise(cuts))[::-1] or [(1, 1)]
    names = ["_".join(filter(None, (_name(mesh, cut) for mesh in meshes))) for cut in fine]
    named = len({*names, ""}) > len(names)
    common = DeviceMesh(
        ids, tuple(wide // narrow for narrow, wide in fine), axis_names=names if named else None
    )
    moved = {layout: _moved(layout, common, fine) for layout in dict.fromkeys(layouts.values())}
    for old, new in moved.items():
        # Finer axes may cut an uneven dim elsewhere.
        if any(old.intervals(device) != new.intervals(device) for device in ids):
            return DeviceMesh(ids, (len(ids),)), dict(layouts)
    return common, {name: moved[layout] for name, layout in layouts.items()}


def _moved(layout: Layout, common: DeviceMesh, fine: list[tuple[int, int]]) -> Layout:
    """Return `layout` on the common mesh, whose shorter axes `fine` replace those of its mesh."""
    dims = {}
    for dim, cut in enumerate(layout.spec.dim_specs):
        if axes := _finer(cut, layout.mesh, fine):
            dims[dim] = replace(cut, axes=axes)
    spec = ShardingSpec(layout.spec.dims, dims)
    return Layout(common, spec, layout.global_shape, layout.dtype)


def _steps(mesh: DeviceMesh) -> list[int]:
    """Return the numbers of devices on the last axis, the last two, and so on: 2x3 gives 3, 6."""
    return list(accumulate(mesh.shape[::-1], mul))


def _between(mesh: DeviceMesh, axis: int) -> range:
    wide = _steps(mesh)[::-1][axis]
    return range(wide // mesh.shape[axis], wide)


def _name(mesh: DeviceMesh, cut: tuple[int, int]) -> str:
    """Return the name of the axis of `mesh` that contains axis `cut` of the common mesh, or ""."""
    axes = enumerate(mesh.axis_names or ())
    return next((name for axis, name in axes if cut[0] in _between(mesh, axis)), "")


def _finer(cut: DimSpec, mesh: DeviceMesh, fine: list[tuple[int, int]]) -> tuple[int, ...]:
    """Return the axes of the common mesh that shard a dim instead of the axes `cut` of `mesh`."""
    places = [_between(mesh, mesh.axis(axis)) for axis in cut.axes]
    return tuple(at for within in places for at, (low, _) in enumerate(fine) if low in within)


def on_larger_mesh(layout: Layout, mesh: DeviceMesh) -> Layout | None:
    """Return a layout rewritten for a larger mesh; None if its mesh is not a slice of that.

    >>> layout = Layout(DeviceMesh([1, 3], (2,)), "[S0]", (4,), "f32")
    >>> print(on_larger_mesh(layout, DeviceMesh(range(4), (2, 2))))
    [S0] of [4] float32 on 2x2
    """
    if layout.mesh == mesh:
        return layout
    axes = _axes_on(layout.mesh, mesh)
    if axes is None:
        return None
    spec = layout.spec
    cuts: dict[int, DimSpec] = {}
    for dim, cut in enumerate(spec.dim_specs):
        by = tuple(axes[int(axis)] for axis in cut.axes if axis in axes)
        # Axes of one device do not shard, so without other axes there are no parts either.
        cuts[dim] = DimSpec(by, cut.parts, cut.block) if by else DimSpec()
    pending: dict[Axis, ReduceOp] = {
        axes[int(p.axis)]: p.op for p in spec.partials if p.axis in axes
    }
    onto_mesh = ShardingSpec(spec.dims, cuts, partial=pending)
    return Layout(mesh, onto_mesh, layout.global_shape, layout.dtype)


@lru_cache(maxsize=64)
def _axes_on(own: DeviceMesh, mesh: DeviceMesh) -> dict[int, int] | None:
    """Return axis of `own` -> same axis of `mesh`, without size 1; None if `own` is no slice."""
    first, longer = own.ids[0], [axis for axis, size in enumerate(own.shape) if size > 1]
    shape = [own.shape[axis] for axis in longer]
    for onto in permutations(range(mesh.ndim), len(longer)) if first in mesh.ids else ():
        same_shape = [mesh.shape[axis] for axis in onto] == shape
        if same_shape and tuple(mesh.group(first, onto)) == tuple(own.ids):
            return dict(zip(longer, onto, strict=True))
    return None
