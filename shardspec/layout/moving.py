"""What a step between two layouts moves, as data for communicators."""

from functools import lru_cache

from shardspec.boxes import Box
from shardspec.comm.steps import Step
from shardspec.comm.transfers import Transfers
from shardspec.layout.cross import common_mesh
from shardspec.layout.layout import Layout, LayoutCell
from shardspec.mesh.device_mesh import DeviceMesh


@lru_cache(maxsize=512)
def transfers_of(step: Step, before: Layout, after: Layout, cell: Box | None = None) -> Transfers:
    """Return what a step moves among the devices of both layouts, or what of one cell of them.

    A cell is a box of the tensor of which each device has one box, as `cells_of` says; layouts
    that are not cut by parts need none. Devices outside a layout's mesh hold nothing. A scalar has
    no dim along which to hold nothing, so between two meshes it is a vector of one element.

    Examples
    --------
    >>> from shardspec.comm.steps import Slice
    >>> before = Layout(DeviceMesh([5, 9], (2,)), "[R]", (3,), "float32")
    >>> transfers_of(Slice(0, (0,)), before, before.with_spec("[S0]")).of(9).incoming
    [(9, ((2, 3),))]
    """
    mesh = common_mesh(before.mesh, after.mesh)
    held, wanted = (_boxes_on(layout, mesh, cell) for layout in (before, after))
    return Transfers(step, mesh, held, wanted)


@lru_cache(maxsize=512)
def _boxes_on(layout: Layout, mesh: DeviceMesh, cell: Box | None) -> tuple[Box, ...]:
    if cell is None and layout.mesh == mesh:
        return tuple(map(layout.box, mesh.ids))
    whole = tuple((0, size) for size in layout.global_shape)
    seen = LayoutCell(layout, whole if cell is None else cell)
    nothing = tuple((hi, hi) for _, hi in seen.cell or ((0, 1),))
    one = ((0, 1),)
    return tuple(seen.box(d) or one if d in layout.mesh else nothing for d in mesh.ids)
