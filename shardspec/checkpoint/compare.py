"""Comparing stored boxes, a block at a time: copies that have to agree, and two checkpoints."""

from collections.abc import Sequence
from dataclasses import replace

from shardspec.boxes import Box, box_size, chunks
from shardspec.checkpoint.catalog import StoredBox, StoredTensor, box_text
from shardspec.checkpoint.copy_plan import BLOCK_BYTES
from shardspec.checkpoint.read_boxes import Buffers, read_box_into
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = ["check_replicas", "element_index"]


def element_index(box: Box, element: int) -> tuple[int, ...]:
    """Return where in the global tensor an element of a box lies, counted row-major in the box."""
    index: list[int] = []
    for lo, hi in reversed(box):
        element, at = divmod(element, hi - lo)
        index.insert(0, lo + at)
    return tuple(index)


def check_replicas(
    tensor: StoredTensor,
    group: Sequence[StoredBox],
    files: OpenFiles,
    *,
    trust_digests: bool = False,
) -> None:
    """Raise unless boxes that claim the same part of a tensor have the same elements, bit by bit.

    With `trust_digests`, boxes whose digests are equal are taken for equal, without reading them.
    """
    first, *others = group
    size = item_bytes(tensor.dtype)
    buffers = Buffers()
    rooms = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))
    for other in others:
        if trust_digests and _same_digest(first, other, box_size(first.box) * size):
            continue
        # Each by itself, wherever its elements lie in its file.
        alone = [
            replace(tensor, pending=(), boxes=(replace(b, addend=()),)) for b in (first, other)
        ]
        for block in chunks(first.box, BLOCK_BYTES // size):
            a, b = (room[: box_size(block) * size] for room in rooms)
            read_box_into(alone[0], block, a, files, buffers)
            read_box_into(alone[1], block, b, files, buffers)
            if a.tobytes() != b.tobytes():
                at = next(at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                index = list(element_index(block, at // size))
                remedy = "keep the right one of the two"
                if len(tensor.shape) == 1 and first.path.suffix == ".distcp":
                    remedy += (
                        "; but if ranks have saved flat parts of their own under one name, as "
                        "FSDP1's local optimizer states are, keep all, and save them in a run of "
                        "as many ranks with FSDP.optim_state_dict"
                    )
                raise CheckpointError(
                    f"tensor {tensor.name!r}: ranks {first.rank} and {other.rank} claim different "
                    f"data for box {box_text(first.box)}, first at index {index}, in {first.path} "
                    f"and {other.path}; {remedy}"
                )


def _same_digest(a: StoredBox, b: StoredBox, num_bytes: int) -> bool:
    """Return whether both have a digest of just their bytes, in the same order, and it is equal."""
    if a.digest is None or b.digest is None or a.strides != b.strides:
        return False
    whole = a.digest.num_bytes == b.digest.num_bytes == num_bytes
    return whole and a.digest.crc32 == b.digest.crc32
