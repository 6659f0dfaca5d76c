"""Which rank stores which box: each once, the work spread evenly."""

from collections.abc import Mapping

from shardspec.boxes import box_size
from shardspec.checkpoint.catalog import ReplicaKey, replica_holders
from shardspec.checkpoint.sharding_info import BoxEntry
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

__all__ = ["assign_boxes"]


def assign_boxes(
    mesh: DeviceMesh, tensors: Mapping[str, Layout], *, spread: bool = True
) -> dict[int, list[BoxEntry]]:
    """Choose one of the devices that hold a box to store it, for every box that is not empty.

    Every rank computes the same answer alone: boxes of one holder first, then the others from the
    largest down, each to the holder that has the fewest bytes so far (the first of equals). If
    they are not to be `spread`, each box goes to the first of its holders.

    Returns
    -------
    dict
        For every device of the mesh its boxes, by tensor name.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> chosen = assign_boxes(mesh, {name: Layout(mesh, "[R]", (3,), "int8") for name in "abc"})
    >>> [[entry.tensor for entry in chosen[rank]] for rank in mesh.ids]
    [['a', 'c'], ['b']]
    """
    parts_of: dict[Layout, dict[ReplicaKey, tuple[int, ...]]] = {}
    chosen: dict[int, list[BoxEntry]] = {rank: [] for rank in mesh.ids}
    load = dict.fromkeys(mesh.ids, 0)
    shared: list[tuple[int, BoxEntry, tuple[int, ...]]] = []
    for name in sorted(tensors):
        layout = tensors[name]
        if layout not in parts_of:
            parts_of[layout] = replica_holders(layout)
        for (box, addend), ranks in parts_of[layout].items():
            num_bytes = box_size(box) * item_bytes(layout.dtype)
            entry = BoxEntry(name, box, addend)
            if len(ranks) > 1 and spread:
                shared.append((num_bytes, entry, ranks))
            else:
                chosen[ranks[0]].append(entry)
                load[ranks[0]] += num_bytes
    # A stable sort: boxes of equal size keep their order, by name and then by holder.
    for num_bytes, entry, ranks in sorted(shared, key=lambda item: -item[0]):
        rank = min(ranks, key=load.__getitem__)
        chosen[rank].append(entry)
        load[rank] += num_bytes
    for entries in chosen.values():
        entries.sort(key=lambda entry: entry.tensor)
    return chosen
