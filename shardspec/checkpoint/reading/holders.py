"""Which devices hold the same data, and hence which of them needs to store it."""

from typing import TypeAlias

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.reading.source import Pending
from shardspec.layout.layout import Layout

__all__ = ["Part", "holders", "part_of", "pending_of"]

Part: TypeAlias = tuple[Box, tuple[int, ...]]
"""A box, and which addend of the pending reductions it is."""


def pending_of(layout: Layout) -> tuple[Pending, ...]:
    """Return the pending reductions of a layout, in the order of its spec.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> pending_of(Layout(DeviceMesh(range(6), (2, 3)), "[R|P1]", (4,), "f32"))
    (Pending(op='sum', addends=3),)
    """
    mesh = layout.mesh
    return tuple(Pending(p.op, mesh.shape[mesh.axis(p.axis)]) for p in layout.spec.partials)


def part_of(layout: Layout, physical_id: int) -> Part:
    """Return what a device holds.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> part_of(Layout(DeviceMesh(range(6), (2, 3)), "[S0|P1]", (4,), "f32"), 5)
    (((2, 4),), (2,))
    """
    at = layout.mesh.coordinates(physical_id)
    addend = tuple(at[layout.mesh.axis(p.axis)] for p in layout.spec.partials)
    return layout.box(physical_id), addend


def holders(layout: Layout) -> dict[Part, tuple[int, ...]]:
    """Return every part that is not empty and the devices that hold it, in the mesh's order.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> holders(Layout(DeviceMesh(range(6), (3, 2)), "[S0]", (2,), "f32"))
    {(((0, 1),), ()): (0, 1), (((1, 2),), ()): (2, 3)}
    """
    found: dict[Part, list[int]] = {}
    for physical_id in layout.mesh.ids:
        part = part_of(layout, physical_id)
        if box_size(part[0]):
            found.setdefault(part, []).append(physical_id)
    return {part: tuple(ids) for part, ids in found.items()}
