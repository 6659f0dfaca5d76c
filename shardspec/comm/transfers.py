"""Who sends which box to whom in one step: one rule for every step.

Along the axes of a step devices form groups, and inside a group a device gets from each member what
its box after the step shares with the member's box before it. Where a reduction is pending, the
boxes of the members are the same and the parts are combined; otherwise they are disjoint and are
put side by side.
"""

from shardspec.boxes import Box, intersect
from shardspec.comm.communicator import BoxOf
from shardspec.comm.steps import Slice, Step
from shardspec.mesh import DeviceMesh

__all__ = ["incoming", "outgoing"]


def incoming(
    step: Step, mesh: DeviceMesh, device: int, before: BoxOf, after: BoxOf
) -> list[tuple[int, Box]]:
    """Return what a device receives: pairs of sender and box, its own part included.

    Examples
    --------
    >>> from shardspec.comm.steps import AllGather
    >>> from shardspec.layout.layout import Layout
    >>> cut = Layout(DeviceMesh(range(2), (2,)), "[S0]", (5,), "int8")
    >>> incoming(AllGather(0, (0,)), cut.mesh, 0, cut.box, cut.with_spec("[R]").box)
    [(0, ((0, 3),)), (1, ((3, 5),))]
    """
    wanted = after(device)
    parts = ((peer, intersect(wanted, before(peer))) for peer in _members(step, mesh, device))
    return [(peer, box) for peer, box in parts if box is not None]


def outgoing(
    step: Step, mesh: DeviceMesh, device: int, before: BoxOf, after: BoxOf
) -> list[tuple[int, Box]]:
    """Return what a device sends: pairs of receiver and box, its own part included."""
    held = before(device)
    parts = ((peer, intersect(held, after(peer))) for peer in _members(step, mesh, device))
    return [(peer, box) for peer, box in parts if box is not None]


def _members(step: Step, mesh: DeviceMesh, device: int) -> tuple[int, ...]:
    """Return the devices that move data among themselves, in the mesh's own order.

    Sorted axes make the order of addends, and so the rounding of sums, the same on every device.
    A slice has axes, but nothing moves along them.
    """
    return (device,) if isinstance(step, Slice) else mesh.group(device, sorted(step.axes))
