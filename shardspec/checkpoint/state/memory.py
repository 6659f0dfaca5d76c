"""Presents state dicts in memory as catalogs, which are read like the files of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import ZEROS, Catalog, StoredBox, StoredTensor, assign_boxes
from shardspec.checkpoint.state import rank_state
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.comm.communicator import Communicator
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout

if TYPE_CHECKING:
    import torch

NAME: Final = "state dict"
"""Format name of a catalog in memory."""


class Memory:
    """Bytes of a tensor in memory, read like those of a file."""

    def __init__(self, tensor: "torch.Tensor") -> None:
        self._tensor = tensor

    @property
    def reads(self) -> Mapping[StoragePath, int]:
        """An empty dict, since no files are read."""
        return {}

    def bits(self, shape: Sequence[int], strides: Sequence[int], start: int) -> NDArray[np.generic]:
        """Return elements as unsigned numbers; strides and start are in bytes."""
        from shardspec.tensor.shards import bits_of

        width = self._tensor.element_size()
        steps = [step // width for step in strides]
        first = self._tensor.storage_offset() + start // width
        return bits_of(self._tensor.as_strided(list(shape), steps, first))

    def fill(
        self, start: int, steps: Sequence[tuple[int, int, int]], room: memoryview, at: int
    ) -> None:
        """Copy a part of the tensor into a block of memory; see `Computed.fill`."""
        *outer, (run, _, _) = steps
        width = self._tensor.element_size()
        shape = [*(count for count, _, _ in outer), run // width]
        part = self.bits(shape, [*(step for _, step, _ in outer), width], start)
        inside = [*(step for _, _, step in outer), width]
        np.copyto(np.ndarray(shape, part.dtype, room, at, inside), part)


def catalog_of(described: rank_state.Described, communicator: Communicator) -> Catalog:
    """Return a state dict as a checkpoint with the boxes that this process contributes."""
    boxes: dict[str, list[StoredBox]] = {name: [] for name in described.layouts}
    entries = assign_boxes(communicator.mesh, described.layouts)
    for rank in communicator.addressable:
        for name, box, *_ in entries[rank]:
            layout = described.layouts[name]
            shard = rank_state.box_of_shard(described.shards[name][rank], layout, rank, box)
            strides = tuple(step * item_bytes(layout.dtype) for step in shard.stride())
            stored = StoredBox(box, (), rank, ZEROS, 0, strides=strides, computed=Memory(shard))
            boxes[name].append(stored)
    tensors = {
        name: StoredTensor(name, layout.global_shape, layout.dtype, None, (), tuple(boxes[name]))
        for name, layout in described.layouts.items()
    }
    return Catalog(NAME, ZEROS, tensors, ())


def state_catalog(state: Mapping[str, Any]) -> Catalog:
    """Return a state dict of this process as a checkpoint; plain values are skipped.

    Tensors of a state dict without DTensors are whole here, also in a job. Raises LayoutError if
    shards are on other ranks or a reduction is pending.
    """
    communicator = rank_state.communicator_of_state(state, alone=True)
    if set(communicator.addressable) != set(communicator.mesh.ids):
        raise LayoutError(
            "the state dict has shards on other ranks; gather it first, with full_tensor(), or "
            "save it with save_sharded"
        )
    described = rank_state.describe(state, communicator)
    require_no_sums(described.layouts)
    return catalog_of(described, communicator)


def require_no_sums(layouts: Mapping[str, Layout]) -> None:
    """Raise LayoutError if the reduction of a tensor is pending."""
    for name, layout in layouts.items():
        if layout.spec.partials:
            raise LayoutError(
                f"{name!r} is laid out as {layout.spec}, with a reduction pending, so it has no "
                f"digest yet; finish it, with redistribute({str(layout.spec.without_partial())!r})"
            )
