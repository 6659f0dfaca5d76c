"""Who sends which box to whom in one step.

Along the axes of a collective, devices form groups, and inside a group a device gets from each
member what its box after the step shares with the member's box before it. Where a reduction is
pending, the boxes of the members are the same and the parts are combined; otherwise they are
disjoint and are put side by side. Exchange and permute have routes of their own.
"""

from collections import defaultdict
from operator import ne
from typing import TypeAlias

from shardspec.boxes import Box, intersect
from shardspec.comm.communicator import BoxOf
from shardspec.comm.routing import Distance, exchange_routes, permute_routes
from shardspec.comm.steps import Exchange, Permute, Slice, Step
from shardspec.mesh import DeviceMesh

__all__ = ["Parts", "Transfers", "distance_on"]

Parts: TypeAlias = list[tuple[int, Box]]
"""Pairs of peer and box."""


def distance_on(mesh: DeviceMesh) -> Distance:
    """Return the function that says on how many axes two devices of a mesh differ.

    Examples
    --------
    >>> distance_on(DeviceMesh(range(8), (2, 2, 2)))(0, 6)
    2
    """
    at = {device: mesh.coordinates(device) for device in mesh.ids}
    return lambda a, b: sum(map(ne, at[a], at[b]))


class Transfers:
    """What each device of a mesh sends and receives in one step, its own part included.

    Parameters
    ----------
    step, mesh
        What moves, and among which devices.
    before, after
        Which box each device holds before and after.

    Examples
    --------
    >>> from shardspec.comm.steps import AllGather
    >>> from shardspec.layout.layout import Layout
    >>> cut = Layout(DeviceMesh(range(2), (2,)), "[S0]", (5,), "int8")
    >>> Transfers(AllGather(0, (0,)), cut.mesh, cut.box, cut.with_spec("[R]").box).incoming(0)
    [(0, ((0, 3),)), (1, ((3, 5),))]
    """

    def __init__(self, step: Step, mesh: DeviceMesh, before: BoxOf, after: BoxOf) -> None:
        self._step, self._mesh, self._before, self._after = step, mesh, before, after
        self._routed = isinstance(step, Permute | Exchange)
        self._incoming: dict[int, Parts] = defaultdict(list)
        self._outgoing: dict[int, Parts] = defaultdict(list)
        if self._routed:
            routes = permute_routes if isinstance(step, Permute) else exchange_routes
            moves = routes(
                {device: before(device) for device in mesh.ids},
                {device: after(device) for device in mesh.ids},
                distance_on(mesh),
            )
            for move in moves:
                self._incoming[move.dst].append((move.src, move.box))
                self._outgoing[move.src].append((move.dst, move.box))

    def incoming(self, device: int) -> Parts:
        """Return what a device receives, and from whom."""
        if self._routed:
            return self._incoming[device]
        return self._shared(self._after(device), device, self._before)

    def outgoing(self, device: int) -> Parts:
        """Return what a device sends, and to whom."""
        if self._routed:
            return self._outgoing[device]
        return self._shared(self._before(device), device, self._after)

    def _shared(self, mine: Box, device: int, theirs: BoxOf) -> Parts:
        parts = ((peer, intersect(mine, theirs(peer))) for peer in self._members(device))
        return [(peer, box) for peer, box in parts if box is not None]

    def _members(self, device: int) -> tuple[int, ...]:
        """Return the devices that move data among themselves, in the mesh's own order.

        Sorted axes make the order of addends, and so the rounding of sums, the same on every
        device. A slice has axes, but nothing moves along them.
        """
        if isinstance(self._step, Slice):
            return (device,)
        return self._mesh.group(device, sorted(self._step.axes))
