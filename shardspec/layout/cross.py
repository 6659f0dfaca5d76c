"""One exchange between two meshes: who sends what, what it costs, what it holds.

The devices of both meshes are looked at as one mesh, on which a device that is not in the source's
mesh holds nothing and one that is not in the target's wants nothing. So the exchange between meshes
is the exchange among the devices of that one mesh, and nothing here knows more about it.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from operator import ne
from typing import Final

from shardspec.boxes import Box, box_size, intersect
from shardspec.comm.cost import CostModel, Link
from shardspec.comm.routes import Transfer, distance_on, exchange_routes
from shardspec.comm.steps import Exchange
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.mesh import DeviceMesh, LinkModel

__all__ = [
    "MAX_PIECES",
    "MOST_DEVICES",
    "boxes_seconds",
    "common_mesh",
    "common_model",
    "count_pieces",
    "exchange_seconds",
    "exchange_to",
    "held_bytes",
    "missing",
    "most_held",
    "received_bytes",
    "routes_seconds",
]

MOST_DEVICES: Final = 1 << 14
"""Devices between which boxes are exchanged one by one."""
MAX_PIECES: Final = 500_000
"""Pieces that one exchange between two meshes may have: to list them takes seconds."""


@lru_cache(maxsize=64)
def common_mesh(a: DeviceMesh, b: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the devices of both: the one that has them all, or a row of them.

    Where both have all, the one with more axes says more about who is near whom.

    Examples
    --------
    >>> node, pair = DeviceMesh(range(8), (2, 4)), DeviceMesh([6, 7], (2,))
    >>> common_mesh(pair, node) == node
    True
    >>> common_mesh(pair, DeviceMesh([7, 8], (2,))).ids
    (6, 7, 8)
    """
    ids_a, ids_b = set(a.ids), set(b.ids)
    if ids_b <= ids_a and (ids_a != ids_b or a.ndim >= b.ndim):
        return a
    if ids_a <= ids_b:
        return b
    union = sorted(ids_a | ids_b)
    return DeviceMesh(union, (len(union),))


def common_model(a: DeviceMesh, b: DeviceMesh, model_a: CostModel, model_b: CostModel) -> CostModel:
    """Return the links of `common_mesh`: its own, or the slowest of both for a row of devices.

    Examples
    --------
    >>> left, right = DeviceMesh([0, 1], (2,)), DeviceMesh([2, 3], (2,))
    >>> near, far = CostModel((2,), (Link(1e-6, 1e-9),)), CostModel((2,), (Link(3e-6, 1e-10),))
    >>> str(common_model(left, right, near, far).links[0])
    'slowest of both meshes: 3 µs, 1 GB/s'
    """
    mesh = common_mesh(a, b)
    if mesh == a:
        return model_a
    if mesh == b:
        return model_b
    links = (*model_a.links, *model_b.links)
    slowest = Link(
        max(link.latency_s for link in links),
        max(link.seconds_per_byte for link in links),
        "slowest of both meshes",
        max(link.start_s for link in links),
    )
    both_on_bus = model_a.link_model == model_b.link_model == "shared-bus"
    link_model: LinkModel = "shared-bus" if both_on_bus else "ring"
    copy_s = max(model_a.copy_s, model_b.copy_s)
    return CostModel(mesh.shape, (slowest,), link_model, copy_s=copy_s)


def exchange_to(
    before: Layout, after: Layout, model: CostModel, target_model: CostModel | None = None
) -> Exchange:
    """Return the exchange between two layouts: replicas that are as near share the work.

    Parameters
    ----------
    before, after
        Both ends.
    model, target_model
        Of the mesh of each; the second is of use for another mesh only.
    """
    one = before.mesh == after.mesh
    if not one and target_model is not None:
        model = common_model(before.mesh, after.mesh, model, target_model)
    plain = one and before.spec.is_plain and after.spec.is_plain
    cut = map(int, before.spec.axes) if plain else range(len(model.links))
    return Exchange(tuple(range(before.mesh.ndim)) if one else (), model.apart(cut))


def exchange_seconds(before: Layout, after: Layout, model: CostModel) -> float:
    """Return the modelled seconds of an exchange between two layouts, part by part.

    Parameters
    ----------
    before, after
        The same tensor, nothing pending.
    model
        Of the `common_mesh` of both.

    Examples
    --------
    >>> left, right = DeviceMesh([0, 1], (2,)), DeviceMesh([2, 3], (2,))
    >>> before, after = Layout(left, "[S0]", (8,), "int8"), Layout(right, "[R]", (8,), "int8")
    >>> exchange_seconds(before, after, CostModel((4,), (Link(1.0, 0.5),)))
    6.0
    """
    mesh, item = _checked_mesh(before, after), item_bytes(before.dtype)
    ends = [
        (LayoutCell(before, cell).boxes(), LayoutCell(after, cell).boxes())
        for cell in cells_of(before, after)
    ]
    return sum(boxes_seconds(*boxes, mesh, model, item) for boxes in ends)


def _checked_mesh(before: Layout, after: Layout) -> DeviceMesh:
    mesh = common_mesh(before.mesh, after.mesh)
    if mesh.size > MOST_DEVICES:
        raise LayoutError(
            f"the exchange between {before.spec} and {after.spec} is among {mesh.size:,} devices; "
            f"such are planned for up to {MOST_DEVICES:,}"
        )
    return mesh


def boxes_seconds(
    held: Mapping[int, Box],
    wanted: Mapping[int, Box],
    mesh: DeviceMesh,
    model: CostModel,
    item: int,
) -> float:
    """Return the modelled seconds of an exchange, given the boxes of all devices.

    Raises
    ------
    LayoutError
        If so many pieces would travel that they cannot be listed.
    """
    pieces = count_pieces(held, wanted)
    if pieces > MAX_PIECES:
        raise LayoutError(
            f"between these meshes {pieces:,} pieces of the tensor would travel; conversions of up "
            f"to {MAX_PIECES:,} are planned: cut the tensor alike on both, or by fewer devices"
        )
    moves = exchange_routes(held, wanted, distance_on(mesh, model.apart(range(mesh.ndim))))
    seconds = routes_seconds(moves, mesh, model, item)
    return seconds + model.copy_s * most_held(held, wanted) * item if seconds else seconds


def count_pieces(held: Mapping[int, Box], wanted: Mapping[int, Box]) -> int:
    """Return how many pieces travel or stay in an exchange.

    Examples
    --------
    >>> count_pieces({0: ((0, 4),), 1: ((4, 8),)}, {0: ((0, 8),), 1: ((3, 8),)})
    4
    """
    sides = [sorted(set(side)) for side in zip(*held.values(), strict=True)]
    starts, ends = [[lo for lo, _ in side] for side in sides], [[hi for _, hi in s] for s in sides]
    found: Counter[Box] = Counter(wanted.values())
    return sum(
        times
        * prod(
            max(0, bisect_left(start, hi) - bisect_right(end, lo))
            for start, end, (lo, hi) in zip(starts, ends, box, strict=True)
        )
        for box, times in found.items()
    )


def routes_seconds(
    moves: Sequence[Transfer], mesh: DeviceMesh, model: CostModel, item: int
) -> float:
    """Return the modelled seconds of transfers that travel at once.

    Parameters
    ----------
    moves
        What travels; a pair of devices has one transfer at most.
    mesh, model
        Where, and its links.
    item
        Bytes of an element.
    """
    busy: dict[tuple[str, int], float] = defaultdict(float)
    peers: dict[tuple[str, int], int] = defaultdict(int)
    latency = per_byte = moved = 0.0
    at = {device: mesh.coordinates(device) for device in mesh.ids}
    links: dict[tuple[bool, ...], tuple[float, float]] = {}
    for move in moves:
        if move.src == move.dst:
            continue
        differ = tuple(map(ne, at[move.src], at[move.dst]))
        if differ not in links:
            links[differ] = model.slowest([axis for axis, other in enumerate(differ) if other])
        alpha, beta = links[differ]
        num_bytes = box_size(move.box) * item
        latency, per_byte, moved = max(latency, alpha), max(per_byte, beta), moved + num_bytes
        for end in (("sends", move.src), ("receives", move.dst)):
            busy[end] += alpha + num_bytes * beta
            peers[end] += 1
    start = model.start_s if moved else 0.0
    if model.link_model == "shared-bus":
        return start + max(peers.values(), default=0) * latency + moved * per_byte
    return start + max(busy.values(), default=0.0)


def received_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes that the busiest device of the target's mesh lacks.

    Examples
    --------
    >>> left, right = DeviceMesh([0, 1], (2,)), DeviceMesh([1, 2], (2,))
    >>> received_bytes(Layout(left, "[S0]", (8,), "int8"), Layout(right, "[S0]", (8,), "int8"))
    4
    """
    _checked_mesh(before, after)
    lacking: dict[int, int] = dict.fromkeys(after.mesh.ids, 0)
    for cell in cells_of(before, after):
        held, wanted = LayoutCell(before, cell).boxes(), LayoutCell(after, cell).boxes()
        for device, box in wanted.items():
            lacking[device] += missing(box, held.get(device))
    return max(lacking.values()) * item_bytes(before.dtype)


def missing(wanted: Box, held: Box | None) -> int:
    """Return the elements of a box that one who has another box lacks.

    Examples
    --------
    >>> missing(((0, 4), (0, 2)), ((2, 6), (1, 9))), missing(((0, 4),), None)
    (6, 4)
    """
    kept = None if held is None else intersect(wanted, held)
    return box_size(wanted) - (box_size(kept) if kept is not None else 0)


def held_bytes(before: Layout, after: Layout) -> int:
    """Return the bytes that the fullest device of either mesh holds before and after together.

    Examples
    --------
    >>> left, right = DeviceMesh([0, 1], (2,)), DeviceMesh([2, 3], (2,))
    >>> held_bytes(Layout(left, "[S0]", (8,), "int8"), Layout(right, "[R]", (8,), "int8"))
    8
    """
    return max(
        sum(prod(layout.local_shape(d)) for layout in (before, after) if d in layout.mesh)
        for d in {*before.mesh.ids, *after.mesh.ids}
    ) * item_bytes(before.dtype)


def most_held(held: Mapping[int, Box], wanted: Mapping[int, Box]) -> int:
    """Return the elements that the fullest device holds before and after together."""
    return max(
        sum(box_size(boxes[device]) for boxes in (held, wanted) if device in boxes)
        for device in held.keys() | wanted.keys()
    )
