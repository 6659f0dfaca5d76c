"""Reading shardspec's own format: the sharding info joined with the headers of its files."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import (
    Digest,
    ListedCatalog,
    ReplicaKey,
    StoredBox,
    StoredTensor,
    box_text,
    replica_holders,
    replica_key,
    stored_reductions,
)
from shardspec.checkpoint.formats.names import INFO_NAME, NATIVE
from shardspec.checkpoint.formats.safetensors_header import (
    Header,
    HeaderEntry,
    TensorSlot,
    encode_header,
    read_header,
)
from shardspec.checkpoint.sharding_info import (
    SAVE_KEY,
    BoxEntry,
    FileEntry,
    ShardingInfo,
    format_info,
    read_info,
)
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.writing.assign import assign_boxes
from shardspec.checkpoint.writing.targets import OutputFile, Piece, Slot, Target, Wanted
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

__all__ = [
    "open_native",
    "shard_metadata",
    "sharded_target",
]

_Due: TypeAlias = Callable[[Layout, int], ReplicaKey]
"""Which part a device holds by a layout."""


def shard_metadata(save: str, rank: int) -> dict[str, str]:
    """Return what every file says about itself, so that a stray file is found out."""
    return {"format": "pt", "shardspec.rank": str(rank), SAVE_KEY: save}


class NativeCatalog(ListedCatalog):
    """A checkpoint that `save_sharded` wrote; made by `open_native`."""

    def __init__(
        self,
        directory: Path,
        info: ShardingInfo,
        tensors: Mapping[str, StoredTensor],
        files: Iterable[Path],
    ) -> None:
        super().__init__(NATIVE, directory, tensors, files, info.mesh, info.values)
        self.info = info


def open_native(directory: Path) -> NativeCatalog:
    """Read the sharding info and the header of every file, and check that they agree."""
    info = read_info(directory)
    parts: dict[tuple[Layout, int], ReplicaKey] = {}

    def due(layout: Layout, rank: int) -> ReplicaKey:
        # Many tensors are cut alike.
        found = parts.get((layout, rank))
        if found is None:
            found = parts[layout, rank] = replica_key(layout, rank)
        return found

    stored: dict[str, list[StoredBox]] = {name: [] for name in info.tensors}
    paths = [file_inside(directory, file.name, directory / INFO_NAME) for file in info.files]
    files = zip(paths, info.files, strict=True)
    with prefetch_map(
        files, lambda at: _read_file(*at, info, due), prefetch_depth(directory)
    ) as headers:
        for path, file, header in zip(paths, info.files, headers, strict=True):
            places = {entry.name: (entry.offset, entry.num_bytes) for entry in header.entries}
            for entry in file.boxes:
                offset, num_bytes = places[entry.tensor]
                digest = None if entry.crc32 is None else Digest(entry.crc32, offset, num_bytes)
                stored[entry.tensor].append(
                    StoredBox(entry.box, entry.addend, file.rank, path, offset, digest)
                )
    parts_of: dict[Layout, dict[ReplicaKey, tuple[int, ...]]] = {}
    for name, layout in info.tensors.items():
        if layout not in parts_of:
            parts_of[layout] = replica_holders(layout)
        found = {(box.box, box.addend) for box in stored[name]}
        for part, ranks in parts_of[layout].items():
            if part not in found:
                raise CheckpointError(
                    f"{directory}: tensor {name!r}: no file holds its box {_part_text(part)}, "
                    f"which {_ranks_text(ranks)} held; restore that file or save again"
                )
    tensors = {
        name: StoredTensor(
            name,
            layout.global_shape,
            layout.dtype,
            layout.spec,
            stored_reductions(layout),
            tuple(stored[name]),
        )
        for name, layout in info.tensors.items()
    }
    return NativeCatalog(directory, info, tensors, (directory / INFO_NAME, *paths))


def _read_file(path: Path, file: FileEntry, info: ShardingInfo, due: _Due) -> Header:
    """Return the header of a file once it agrees with the info in every respect."""
    if not path_exists(path):
        raise CheckpointError(
            f"{path}: the file of rank {file.rank} is missing; restore it or save again"
        )
    for entry in file.boxes:
        _check_box(entry, file.rank, due(info.tensors[entry.tensor], file.rank), path, info)
    with SourceFile(path) as opened:
        expected = _expected(file, info)
        if expected is not None and opened.num_bytes == expected[1].file_bytes == file.num_bytes:
            head, header = expected
            if opened.read(0, len(head)) == head:
                return header
        header = read_header(opened)
    if header.file_bytes != file.num_bytes:
        raise CheckpointError(
            f"{path}: has {header.file_bytes} bytes but {INFO_NAME} says {file.num_bytes}; the "
            "file was changed, restore it"
        )
    for key, said in shard_metadata(info.save, file.rank).items():
        if header.metadata.get(key) != said:
            raise CheckpointError(
                f"{path}: its metadata says {key} {header.metadata.get(key)!r} but {INFO_NAME} "
                f"says {said!r}; the file belongs elsewhere, restore the right one"
            )
    listed = {entry.tensor: entry for entry in file.boxes}
    for found in header.entries:
        if found.name not in listed:
            raise CheckpointError(
                f"{path}: holds tensor {shown(found.name, 200)}, which {INFO_NAME} does not list "
                "for it; the file was changed, restore it"
            )
        _check_entry(listed.pop(found.name), found, path, info)
    for name in listed:
        raise CheckpointError(
            f"{path}: lacks tensor {name!r}, which {INFO_NAME} lists for it; the file was "
            "changed, restore it"
        )
    return header


def _expected(file: FileEntry, info: ShardingInfo) -> tuple[bytes, Header] | None:
    """Return the header that a file has if it is as `save_sharded` writes it."""
    slots = (
        TensorSlot(entry.tensor, info.tensors[entry.tensor].dtype, box_shape(entry.box))
        for entry in file.boxes
    )
    try:
        return encode_header(slots, shard_metadata(info.save, file.rank))
    except CheckpointError:
        # No writer could have written it; what it says is read and refused.
        return None


def _check_box(entry: BoxEntry, rank: int, due: ReplicaKey, path: Path, info: ShardingInfo) -> None:
    layout = info.tensors[entry.tensor]
    if (entry.box, entry.addend) != due:
        raise CheckpointError(
            f"{info_path(path)}: tensor {entry.tensor!r}: rank {rank} is said to hold box "
            f"{_part_text((entry.box, entry.addend))}, but under spec {layout.spec} it holds "
            f"{_part_text(due)}; the info contradicts itself"
        )


def _check_entry(entry: BoxEntry, found: HeaderEntry, path: Path, info: ShardingInfo) -> None:
    """Compare what a header says of a box with what the info says."""
    layout, shape, dtype = info.tensors[entry.tensor], found.shape, found.dtype
    if shape != box_shape(entry.box):
        raise CheckpointError(
            f"{path}: holds tensor {entry.tensor!r} of shape {list(shape)}, but its box "
            f"{box_text(entry.box)} needs {list(box_shape(entry.box))}; the file was changed, "
            "restore it"
        )
    if dtype != layout.dtype:
        raise CheckpointError(
            f"{path}: holds tensor {entry.tensor!r} as {dtype}, but {INFO_NAME} says "
            f"{layout.dtype}; the file was changed, restore it"
        )


def info_path(path: Path) -> Path:
    """Return the info that belongs to a file."""
    return path.parent / INFO_NAME


def _part_text(part: ReplicaKey) -> str:
    box, addend = part
    return f"{box_text(box)} of addend {list(addend)}" if addend else box_text(box)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown} all"


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
