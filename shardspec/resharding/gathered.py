"""Gathers the layouts of a state dict from all ranks of a job; tensors stay where they are."""

import pickle
from collections.abc import Mapping
from hashlib import sha256

import torch
import torch.distributed as dist

from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.state import (
    flat_state,
    is_plain,
    required_layout,
    same_shards,
    stated_layout,
)


def layouts_of_job(state: Mapping[str, object]) -> dict[str, Layout | None]:
    """Return the layouts of the tensors that any rank of the job has; None for plain values.

    All ranks call this, those that hold nothing with ``{}``. Of copies on meshes apart from each
    other, the one with the lowest rank counts. Raises LayoutError on all ranks if two of them lay
    out a tensor in different ways.
    """
    ranks = range(dist.get_world_size())
    communicator = ProcessGroupCommunicator.of(DeviceMesh(ranks))
    rank = dist.get_rank()
    with communicator.telling():
        own = _own_layouts(flat_state(state))
        content = pickle.dumps(own)
        # Most ranks have the same, which is sent by the first of them.
        digests = communicator.gather({rank: sha256(content).digest()})
        first = {digests[peer]: peer for peer in reversed(ranks)}
        sends = first[digests[rank]] == rank
        contents = communicator.gather({rank: content if sends else b""})
    layouts: dict[str, Layout | None] = {}
    holders: dict[str, int] = {}
    for peer in sorted(first.values()):
        stated: dict[str, Layout | None] = pickle.loads(contents[peer])
        for name, layout in stated.items():
            before = layouts.setdefault(name, layout)
            holder = holders.setdefault(name, peer)
            if not _agree(before, layout):
                texts = [str(value) if value else "a plain value" for value in (before, layout)]
                raise LayoutError(
                    f"{name!r} is {texts[0]} on rank {holder} and {texts[1]} on rank {peer}; make "
                    "them alike"
                )
    return layouts


def _own_layouts(state: Mapping[str, object]) -> dict[str, Layout | None]:
    """Return the layouts of the tensors of this rank; None for plain values.

    A plain tensor, as buffers and what `parallelize_module` leaves alone, is replicated over
    the mesh of the DTensors beside it. Raises LayoutError where that is not one mesh.
    """
    layouts = {name: stated_layout(name, value) for name, value in state.items()}
    meshes = {layout.mesh for layout in layouts.values() if layout}
    # A module may have parameters on slices of its mesh.
    whole = max(meshes, key=DeviceMesh.size, default=None)
    if whole and any(not {*mesh.ids} <= {*whole.ids} for mesh in meshes):
        whole = None
    for name, value in state.items():
        if layouts[name] is None and not is_plain(value):
            if whole is None or not isinstance(value, torch.Tensor):
                layouts[name] = required_layout(name, value)
            else:
                layouts[name] = Layout(whole, ShardingSpec(value.dim()), value.shape, value.dtype)
    return layouts


def _agree(ours: Layout | None, theirs: Layout | None) -> bool:
    """Whether two ranks mean the same tensor, or copies of it."""
    if ours is None or theirs is None or ours == theirs:
        return ours == theirs
    alike = (ours.global_shape, ours.dtype) == (theirs.global_shape, theirs.dtype)
    return same_shards(ours, theirs) or (alike and not {*ours.mesh.ids} & {*theirs.mesh.ids})
