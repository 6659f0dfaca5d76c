"""shardspec's own format, read and written: the sharding info, and the headers of its files."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

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
    TensorSlot,
    encode_header,
    read_header,
)
from shardspec.checkpoint.sharding_info import (
    SAVE_KEY,
    FileEntry,
    ShardingInfo,
    format_info,
    read_info,
)
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.targets import (
    Extent,
    OutputFile,
    OutputTensor,
    RawBytes,
    Target,
    assign_boxes,
)
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

__all__ = ["NativeCatalog", "open_native", "shard_metadata", "sharded_target"]

_CHANGED: Final = "the file was changed, restore it"


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
    # Many tensors are sharded alike.
    key_of = lru_cache(None)(replica_key)
    holders_of = lru_cache(None)(replica_holders)
    stored: dict[str, list[StoredBox]] = {name: [] for name in info.tensors}
    paths = [file_inside(directory, file.name, directory / INFO_NAME) for file in info.files]

    def read(at: tuple[Path, FileEntry]) -> Header:
        return _read_file(*at, info, key_of)

    files = list(zip(paths, info.files, strict=True))
    with prefetch_map(files, read, prefetch_depth(directory)) as headers:
        for (path, file), header in zip(files, headers, strict=True):
            places = {entry.name: (entry.offset, entry.num_bytes) for entry in header.entries}
            for name, box, addend, crc32 in file.boxes:
                offset, num_bytes = places[name]
                digest = None if crc32 is None else Digest(crc32, offset, num_bytes)
                stored[name].append(StoredBox(box, addend, file.rank, path, offset, digest))
    tensors = {}
    for name, layout in info.tensors.items():
        boxes = tuple(stored[name])
        found = {(box.box, box.addend) for box in boxes}
        for key, ranks in holders_of(layout).items():
            if key not in found:
                raise CheckpointError(
                    f"{directory}: tensor {name!r}: no file holds its box {_key_text(key)}, "
                    f"which {_ranks_text(ranks)} held; restore that file or save again"
                )
        tensors[name] = StoredTensor(
            name,
            layout.global_shape,
            layout.dtype,
            layout.spec,
            stored_reductions(layout),
            boxes,
        )
    return NativeCatalog(directory, info, tensors, (directory / INFO_NAME, *paths))


def _read_file(
    path: Path, file: FileEntry, info: ShardingInfo, key_of: Callable[[Layout, int], ReplicaKey]
) -> Header:
    """Return the header of a file once it agrees with the info in every respect."""
    if not path_exists(path):
        raise CheckpointError(
            f"{path}: the file of rank {file.rank} is missing; restore it or save again"
        )
    for name, box, addend, _ in file.boxes:
        key = key_of(info.tensors[name], file.rank)
        if (box, addend) != key:
            raise CheckpointError(
                f"{path.parent / INFO_NAME}: tensor {name!r}: rank {file.rank} is said to hold box "
                f"{_key_text((box, addend))}, but under spec {info.tensors[name].spec} it holds "
                f"{_key_text(key)}; the info contradicts itself"
            )
    with SourceFile(path) as opened:
        written = _written_header(file, info)
        if written is not None and opened.num_bytes == written[1].file_bytes == file.num_bytes:
            head, header = written
            if opened.read(0, len(head)) == head:
                return header
        header = read_header(opened)
    if header.file_bytes != file.num_bytes:
        raise CheckpointError(
            f"{path}: has {header.file_bytes} bytes but {INFO_NAME} says {file.num_bytes}; "
            f"{_CHANGED}"
        )
    for key_name, said in shard_metadata(info.save, file.rank).items():
        if header.metadata.get(key_name) != said:
            raise CheckpointError(
                f"{path}: its metadata says {key_name} {header.metadata.get(key_name)!r} but "
                f"{INFO_NAME} says {said!r}; the file belongs elsewhere, restore the right one"
            )
    listed = {entry.tensor: entry.box for entry in file.boxes}
    for found in header.entries:
        if found.name not in listed:
            raise CheckpointError(
                f"{path}: holds tensor {shown(found.name, 200)}, which {INFO_NAME} does not list "
                f"for it; {_CHANGED}"
            )
        box = listed.pop(found.name)
        if found.shape != box_shape(box):
            raise CheckpointError(
                f"{path}: holds tensor {found.name!r} of shape {list(found.shape)}, but its box "
                f"{box_text(box)} needs {list(box_shape(box))}; {_CHANGED}"
            )
        dtype = info.tensors[found.name].dtype
        if found.dtype != dtype:
            raise CheckpointError(
                f"{path}: holds tensor {found.name!r} as {found.dtype}, but {INFO_NAME} says "
                f"{dtype}; {_CHANGED}"
            )
    for name in listed:
        raise CheckpointError(
            f"{path}: lacks tensor {name!r}, which {INFO_NAME} lists for it; {_CHANGED}"
        )
    return header


def _written_header(file: FileEntry, info: ShardingInfo) -> tuple[bytes, Header] | None:
    """Return the header that `save_sharded` writes for a file: comparing is faster than parsing."""
    slots = (
        TensorSlot(entry.tensor, info.tensors[entry.tensor].dtype, box_shape(entry.box))
        for entry in file.boxes
    )
    try:
        return encode_header(slots, shard_metadata(info.save, file.rank))
    except CheckpointError:
        # No writer could have written it; what it says is read and refused.
        return None


def _key_text(key: ReplicaKey) -> str:
    box, addend = key
    return f"{box_text(box)} of addend {list(addend)}" if addend else box_text(box)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown} all"


def sharded_target(
    mesh: DeviceMesh,
    tensors: Sequence[OutputTensor],
    layouts: Mapping[str, Layout],
    save: str | None = None,
) -> Target:
    """Return the output that is a checkpoint as the ranks of a mesh would save it.

    Layouts by name in the output have no reductions pending. `save` names this save in all its
    files.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> layout = Layout(mesh, "[S0]", (3,), "int8")
    >>> target = sharded_target(mesh, [OutputTensor("w", "w", (3,), "int8")], {"w": layout})
    >>> [[extent.box for extent in file.extents] for file in target.files]
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
            Extent(by_name[entry.name], box_of[entry.name], entry.offset)
            for entry in header.entries
        )
        files.append(OutputFile(name, header.file_bytes, (RawBytes(0, head),), slots))
        # The info lists the boxes of a file in the order of their names.
        stated.append(FileEntry(name, rank, header.file_bytes, tuple(boxes)))

    def last(crcs: Mapping[str, Sequence[int]]) -> Sequence[tuple[str, bytes]]:
        entries = []
        for file, entry in zip(files, stated, strict=True):
            slots = zip(file.extents, crcs[file.name], strict=True)
            crc_of = {extent.tensor.name: crc for extent, crc in slots}
            digested = (box._replace(crc32=crc_of[box.tensor]) for box in entry.boxes)
            entries.append(entry._replace(boxes=tuple(digested)))
        info = ShardingInfo(save, mesh, dict(sorted(layouts.items())), tuple(entries))
        return [(INFO_NAME, format_info(info).encode())]

    return Target(tuple(files), directory=True, last=last, digested=True)
