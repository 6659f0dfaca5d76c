"""What one device does in one step, worked out once for every pair of layouts."""

from dataclasses import dataclass
from functools import lru_cache

from shardspec.boxes import Box
from shardspec.comm.communicator import BoxOf
from shardspec.comm.steps import Exchange, Permute, Slice, Step
from shardspec.comm.transfers import Transfers
from shardspec.mesh import DeviceMesh

__all__ = ["Incoming", "Role", "role_of"]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A box that a device gets."""

    peer: int
    """Who holds it; the device itself for a part that stays."""
    box: Box
    """What, in coordinates of the global tensor."""
    held: Box
    """All that the peer holds."""


@dataclass(frozen=True, slots=True)
class Role:
    """What one device does in one step."""

    device: int
    """Physical id."""
    members: tuple[int, ...]
    """The devices that move data among themselves, in the same order on all of them."""
    held: Box
    """What the device holds before the step."""
    wanted: Box
    """What it holds after the step."""
    outgoing: tuple[tuple[int, Box], ...]
    """Who else gets which box from it."""
    incoming: tuple[Incoming, ...]
    """What it gets from whom, its own part included, in an order that is the same everywhere."""


@lru_cache(maxsize=1024)
def role_of(step: Step, mesh: DeviceMesh, device: int, before: BoxOf, after: BoxOf) -> Role:
    """Return what a device does in a step.

    Kept for the methods of layouts that are used again and again, as those of a plan are: methods
    are the same key only if their layouts are the same object, so a miss costs no comparison.

    Examples
    --------
    >>> from shardspec.comm.steps import AllGather
    >>> from shardspec.layout.layout import Layout
    >>> cut = Layout(DeviceMesh(range(2), (2,)), "[S0]", (5,), "int8")
    >>> role_of(AllGather(0, (0,)), cut.mesh, 1, cut.box, cut.with_spec("[R]").box).incoming[0]
    Incoming(peer=0, box=((0, 3),), held=((0, 3),))
    """
    transfers = Transfers(step, mesh, before, after)
    match step:
        case Permute() | Exchange():
            members = mesh.ids
        case Slice():
            members = (device,)
        case _:
            members = mesh.group(device, sorted(step.axes))
    return Role(
        device,
        members,
        before(device),
        after(device),
        tuple((peer, box) for peer, box in transfers.outgoing(device) if peer != device),
        tuple(Incoming(peer, box, before(peer)) for peer, box in transfers.incoming(device)),
    )
