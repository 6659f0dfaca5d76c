"""Seconds and bytes of one step between two layouts, whatever its kind."""

from math import prod

import numpy as np

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import bytes_received
from shardspec.comm.steps import Exchange, Permute, Step
from shardspec.dtypes import item_bytes
from shardspec.layout.cross import exchange_seconds, held_bytes, missing, received_bytes
from shardspec.layout.graph import Cuts, state_of
from shardspec.layout.layout import Layout
from shardspec.layout.routed_cost import Overlaps, geometry_of, routed_prices, without_ones

__all__ = ["live_bytes", "pair_prices", "step_bytes", "step_seconds"]

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
    plain = before.spec.is_plain and after.spec.is_plain
    if before.mesh != after.mesh or (isinstance(step, Exchange) and not plain):
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
    plain = before.spec.is_plain and after.spec.is_plain
    if before.mesh != after.mesh or (isinstance(step, Exchange) and not plain):
        return received_bytes(before, after)
    if not isinstance(step, Permute | Exchange):
        return bytes_received(step, before.mesh.shape, before.max_local_bytes)
    ids = before.mesh.ids[:: -(-before.mesh.size // _ALL_DEVICES)]
    most = max(missing(after.box(device), before.box(device)) for device in ids)
    return most * item_bytes(before.dtype)


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


def pair_prices(source: Layout, target: Cuts, model: CostModel) -> tuple[float, float]:
    """Return the seconds of a permute and of an exchange to one spec; inf where there is none.

    Parameters
    ----------
    source
        A layout with nothing pending.
    target
        Per tensor dim the axes that cut it, on the same mesh.
    model
        Prices of the links.
    """
    kept = without_ones(source.mesh.shape)
    place = {axis: number for number, axis in enumerate(kept)}
    mesh_shape = tuple(source.mesh.shape[axis] for axis in kept)
    model = model.on(kept)
    plain = state_of(source.spec)[0]
    here, there = (
        [tuple(place[a] for a in axes if a in place) for axes in cuts] for cuts in (plain, target)
    )
    sides = list(zip(source.global_shape, here, there, strict=True))
    # Dims that stay whole are one dim.
    whole = prod(size for size, *cuts in sides if not any(cuts))
    sides = [(whole, (), ()), *(side for side in sides if any(side[1:]))]
    geometry = geometry_of(mesh_shape)
    overlaps = [Overlaps(geometry, lists, size) for size, *lists in sides]
    full = (1 << len(mesh_shape)) - 1
    uncut, uncut_then = (
        full - sum(1 << a for axes in cuts for a in axes) for cuts in (here, there)
    )
    row = routed_prices(
        geometry,
        model,
        overlaps,
        np.zeros((1, len(sides)), dtype=np.int64),
        np.ones((1, len(sides)), dtype=np.int64),
        uncut,
        np.array([uncut_then]),
    )
    one = item_bytes(source.dtype)
    permute = np.inf
    if plain != target and _alike(overlaps):
        permute = float(row.permute.at(one)[0]) if here != there else 0.0
    return permute, float(row.exchange.at(one)[0]) or np.inf


def _alike(overlaps: list[Overlaps]) -> bool:
    return all(table.parts[0] == table.parts[1] for table in overlaps)
