"""shardspec's own form, for any mesh and any specs, written by one process."""

import os
from collections.abc import Mapping, Sequence

from shardspec.boxes import box_shape
from shardspec.checkpoint.formats.native import shard_metadata
from shardspec.checkpoint.reading.form_names import INFO_NAME
from shardspec.checkpoint.reading.info import FileEntry, ShardingInfo, format_info
from shardspec.checkpoint.reading.safetensors_file import TensorSlot, encode_header
from shardspec.checkpoint.writing.assign import assign_boxes
from shardspec.checkpoint.writing.targets import OutputFile, Piece, Slot, Target, Wanted
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

__all__ = ["sharded_target"]


def sharded_target(
    mesh: DeviceMesh,
    tensors: Sequence[Wanted],
    layouts: Mapping[str, Layout],
    save: str | None = None,
) -> Target:
    """Return the output that is a checkpoint as the ranks of a mesh would save it.

    Parameters
    ----------
    mesh
        The devices; each that stores a box has a file.
    tensors
        What to write.
    layouts
        Output name to how it is cut; no reductions pending.
    save
        Names this save in all its files; a new name unless stated.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> layout = Layout(mesh, "[S0]", (3,), "int8")
    >>> target = sharded_target(mesh, [Wanted("w", "w", (3,), "int8")], {"w": layout})
    >>> [[slot.box for slot in file.slots] for file in target.files]
    [[((0, 2),)], [((2, 3),)]]
    """
    save = save or os.urandom(8).hex()
    by_name = {tensor.name: tensor for tensor in tensors}
    files: list[OutputFile] = []
    stated: list[FileEntry] = []
    for rank, boxes in assign_boxes(mesh, layouts).items():
        if not boxes:
            continue
        box_of = {entry.tensor: entry.box for entry in boxes}
        head, header = encode_header(
            (TensorSlot(n, layouts[n].dtype, box_shape(box)) for n, box in box_of.items()),
            shard_metadata(save, rank),
        )
        name = f"shard-{rank:05d}-{save}.safetensors"
        slots = tuple(
            Slot(by_name[entry.name], box_of[entry.name], entry.offset) for entry in header.entries
        )
        files.append(OutputFile(name, header.file_bytes, (Piece(0, head),), slots))
        # The info lists the boxes of a file in the order of their names.
        stated.append(FileEntry(name, rank, header.file_bytes, tuple(boxes)))

    def last(crcs: Mapping[str, Sequence[int]]) -> Sequence[tuple[str, bytes]]:
        entries = []
        for file, entry in zip(files, stated, strict=True):
            slots = zip(file.slots, crcs[file.name], strict=True)
            crc_of = {slot.tensor.name: crc for slot, crc in slots}
            digested = (box._replace(crc32=crc_of[box.tensor]) for box in entry.boxes)
            entries.append(entry._replace(boxes=tuple(digested)))
        info = ShardingInfo(save, mesh, dict(sorted(layouts.items())), tuple(entries))
        return [(INFO_NAME, format_info(info).encode())]

    return Target(tuple(files), directory=True, last=last, digested=True)
