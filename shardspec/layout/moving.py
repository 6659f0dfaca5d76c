"""Lists the boxes that devices send to each other in a step between two layouts."""

from functools import lru_cache

from shardspec.boxes import Box
from shardspec.comm.steps import Step
from shardspec.comm.transfers import Transfers
from shardspec.layout.cross import common_mesh
from shardspec.layout.layout import Layout, LayoutCell
from shardspec.mesh.device_mesh import DeviceMesh


@lru_cache(maxsize=512)
def transfers_of(step: Step, before: Layout, after: Layout, cell: Box | None = None) -> Transfers:
    """Return the transfers of a step among the devices of both layouts, or for one cell.

    Layouts with parts need a `cell`, one of `cells_of`. Devices outside a layout's mesh have
    empty boxes. Between two meshes a scalar counts as a vector of one element, which can be empty.

    Examples
    --------
    >>> from shardspec.comm.steps import Slice
    >>> before = Layout(DeviceMesh([5, 9], (2,)), "[R]", (3,), "float32")
    >>> (copy,) = transfers_of(Slice(0, (0,)), before, before.with_spec("[S0]")).of(9).incoming
    >>> copy.sender, copy.box
    (9, ((2, 3),))
    """
    mesh = common_mesh(before.mesh, after.mesh)
    before_boxes, after_boxes = (_boxes_on(layout, mesh, cell) for layout in (before, after))
    return Transfers(step, mesh, before_boxes, after_boxes)


@lru_cache(maxsize=512)
def _boxes_on(layout: Layout, mesh: DeviceMesh, cell: Box | None) -> tuple[Box, ...]:
    if cell is None and layout.mesh == mesh:
        return tuple(map(layout.box, mesh.ids))
    global_box = tuple((0, size) for size in layout.global_shape)
    cells = LayoutCell(layout, global_box if cell is None else cell)
    nothing = tuple((hi, hi) for _, hi in cells.cell or ((0, 1),))
    element = ((0, 1),)
    return tuple(cells.box(d) or element if d in layout.mesh else nothing for d in mesh.ids)
