"""Seconds and bytes of one step between two layouts, whatever its kind."""

from shardspec.boxes import box_size, intersect
from shardspec.comm.cost import CostModel, bytes_received
from shardspec.comm.steps import Exchange, Permute, Step
from shardspec.dtypes import item_bytes
from shardspec.layout.cross import exchange_seconds, held_bytes, received_bytes
from shardspec.layout.graph import state_of
from shardspec.layout.layout import Layout
from shardspec.layout.pricing import pair_prices

__all__ = ["live_bytes", "step_bytes", "step_seconds"]

_ALL_DEVICES = 512


def step_seconds(step: Step, before: Layout, after: Layout, model: CostModel) -> float:
    """Return the modelled seconds of a step.

    Parameters
    ----------
    step, before, after
        What is done, and the layouts on both sides.
    model
        Of the mesh of both layouts, or of the `common_mesh` of two.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> from shardspec.comm.cost import Link
    >>> before = Layout(DeviceMesh(range(4), (2, 2)), "[S0,R]", (4, 4), "int8")
    >>> model = CostModel((2, 2), (Link(1e-6, 1e-9),) * 2)
    >>> round(step_seconds(Permute((0, 1)), before, before.with_spec("[S1,R]"), model), 12)
    1.008e-06
    """
    if before.mesh != after.mesh:
        return exchange_seconds(before, after, model)
    if isinstance(step, Permute | Exchange):
        permute, exchange = pair_prices(before, state_of(after.spec)[0], model)
        return permute if isinstance(step, Permute) else exchange
    return model.step_seconds(step, before.max_local_bytes)


def step_bytes(step: Step, before: Layout, after: Layout) -> int:
    """Return the bytes that the busiest device receives in a step.

    For a collective by a bandwidth-optimal algorithm; for permute and exchange exactly what the
    device lacks. On meshes of more than 512 devices every so-manieth device is looked at.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> before = Layout(DeviceMesh(range(6), (2, 3)), "[S0,R]", (6, 6), "int8")
    >>> step_bytes(Exchange((0, 1)), before, before.with_spec("[S1,R]"))
    12
    """
    if before.mesh != after.mesh:
        return received_bytes(before, after)
    if not isinstance(step, Permute | Exchange):
        return bytes_received(step, before.mesh.shape, before.max_local_bytes)
    ids = before.mesh.ids[:: -(-before.mesh.size // _ALL_DEVICES)]
    return max(_lacking(before, after, device) for device in ids) * item_bytes(before.dtype)


def live_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes that the fullest device holds during a step: its shard before and after.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> before = Layout(DeviceMesh(range(2), (2,)), "[S0]", (8,), "int8")
    >>> live_bytes(before, before.with_spec("[R]"))
    12
    """
    if before.mesh != after.mesh:
        return held_bytes(before, after)
    return before.max_local_bytes + after.max_local_bytes


def _lacking(before: Layout, after: Layout, device: int) -> int:
    wanted = after.box(device)
    kept = intersect(wanted, before.box(device))
    return box_size(wanted) - (box_size(kept) if kept is not None else 0)
