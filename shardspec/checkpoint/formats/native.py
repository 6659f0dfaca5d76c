"""shardspec's own format, read and written: the sharding info, and the headers of its files."""

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardspec.boxes import box_size
from shardspec.checkpoint.catalog import (
    Catalog,
    Digest,
    FileBox,
    FileMetadata,
    Outline,
    ReplicaKey,
    StoredBox,
    StoredTensor,
    box_text,
    replica_holders,
    replica_keys,
    stored_reductions,
)
from shardspec.checkpoint.formats.names import INFO_NAME, NATIVE
from shardspec.checkpoint.formats.safetensors_header import (
    Header,
    TensorSlot,
    encode_header,
    read_header,
)
from shardspec.checkpoint.sharding_info import SAVE_KEY, ShardingInfo, info_lines, read_info
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.state_dict import KeyPath
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.targets import (
    BoxEntry,
    Extent,
    FileEntry,
    OutputFile,
    OutputTensor,
    Put,
    RawBytes,
    Target,
    Write,
    assign_boxes,
    box_columns,
    extent_columns,
    made_bytes,
    stored_shape,
)
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

_CHANGED: Final = "the file was changed, restore it"


def shard_metadata(save: str, rank: int) -> dict[str, str]:
    """Return what every file says about itself, so that a stray file is found out."""
    return {"format": "pt", "shardspec.rank": str(rank), SAVE_KEY: save}


class NativeCatalog(Catalog):
    """A checkpoint that `save_sharded` wrote; made by `open_native`.

    Tensors that are sharded alike share their boxes. Where the boxes lie is kept in two arrays: a
    checkpoint may have a million.
    """

    def __init__(self, directory: Path, info: ShardingInfo) -> None:
        paths = [file_inside(directory, f.name, directory / INFO_NAME) for f in info.files]
        files = (directory / INFO_NAME, *paths)
        super().__init__(NATIVE, directory, info.tensors, files, info.mesh, info.values)
        self.file_metadata = FileMetadata(info.file_metadata)
        self.paths: Mapping[str, KeyPath] = info.paths
        """Names that were no keys of the state dict, but joined: the keys that led there."""
        self._layouts = info.tensors
        self._boxes = _boxes_of(info, paths, directory)
        self._first: dict[str, int] = {}
        """Where in the arrays the first box of a tensor is."""
        count = 0
        for name, boxes in self._boxes.items():
            self._first[name] = count
            count += len(boxes)
        self._offsets = array("q", bytes(8 * count))
        self._crcs = array("q", bytes(8 * count))
        # Files come in the order in which their boxes were counted.
        next_box = dict(self._first)
        looks = list(zip(paths, info.files, strict=True))
        with prefetch_map(
            looks, lambda look: _read_header(*look, info.save), prefetch_depth(directory)
        ) as headers:
            for path, file in looks:
                # One header at a time is kept.
                self._take(path, file, next(headers), next_box)

    def _take(self, path: Path, file: FileEntry, header: Header, next_box: dict[str, int]) -> None:
        """Note where the boxes of a file lie, once its header agrees with the info."""
        due = {name: list(group) for name, group in groupby(file.boxes, attrgetter("tensor"))}
        for name, dtype, shape, offset, _ in header.entries:
            held = due.pop(name, [])
            boxes = [entry.box for entry in held]
            own = (self._layouts[name].dtype, stored_shape(boxes)) if held else None
            if own != (dtype, shape):
                said = "nothing of it"
                if own is not None:
                    where = " and ".join(map(box_text, boxes))
                    said = f"{own[0]} of shape {list(own[1])} for its box {where}"
                raise CheckpointError(
                    f"{path}: holds tensor {shown(name, 200)} as {dtype} of shape {list(shape)}, "
                    f"but {INFO_NAME} says {said}; {_CHANGED}"
                )
            for at, entry in enumerate(held, next_box[name]):
                self._offsets[at] = offset
                self._crcs[at] = -1 if entry.crc32 is None else entry.crc32
                offset += box_size(entry.box) * item_bytes(dtype)
            next_box[name] += len(held)
        for name in due:
            raise CheckpointError(
                f"{path}: lacks tensor {name!r}, which {INFO_NAME} lists for it; {_CHANGED}"
            )

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor and its boxes, which are one object for tensors sharded alike."""
        layout = self._layouts[name]
        pending = stored_reductions(layout)
        boxes = self._boxes[name]
        return Outline(name, layout.global_shape, layout.dtype, layout.spec, pending, boxes)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor and its boxes."""
        layout, boxes = self._layouts[name], []
        for at, held in enumerate(self._boxes[name], self._first[name]):
            offset, crc32 = self._offsets[at], self._crcs[at]
            num_bytes = box_size(held.box) * item_bytes(layout.dtype)
            digest = None if crc32 < 0 else Digest(crc32, offset, num_bytes)
            boxes.append(StoredBox(held.box, held.addend, held.rank, held.path, offset, digest))
        pending = stored_reductions(layout)
        return StoredTensor(
            name, layout.global_shape, layout.dtype, layout.spec, pending, tuple(boxes)
        )


def open_native(directory: Path) -> NativeCatalog:
    """Read the sharding info and the header of every file, and check that they agree."""
    return NativeCatalog(directory, read_info(directory))


def _boxes_of(
    info: ShardingInfo, paths: Sequence[Path], directory: Path
) -> dict[str, tuple[FileBox, ...]]:
    """Return the boxes of every tensor, file by file, once it is checked that its spec gives them.

    Tensors of which the same files hold the same parts have one object.
    """
    box_of = lru_cache(None)(FileBox)
    held: dict[str, list[FileBox]] = {name: [] for name in info.tensors}
    for file, path in zip(info.files, paths, strict=True):
        for name, box, addend, _ in file.boxes:
            held[name].append(box_of(box, addend, file.rank, path))
    known: dict[tuple[Layout, tuple[int, ...]], tuple[FileBox, ...]] = {}
    found = {}
    for name, layout in info.tensors.items():
        boxes = held.pop(name)
        alike = layout, tuple(map(id, boxes))
        if alike not in known:
            _check_boxes(name, layout, boxes, directory)
            known[alike] = tuple(boxes)
        found[name] = known[alike]
    return found


def _check_boxes(name: str, layout: Layout, boxes: Sequence[FileBox], directory: Path) -> None:
    """Check that each box is one that its rank has under the spec, and that none is missing."""
    holders = replica_holders(layout)
    held = [(box.box, box.addend) for box in boxes]
    stored = set(held)
    for part, box in zip(held, boxes, strict=True):
        if box.rank not in holders.get(part, ()):
            own = " and ".join(map(_part_text, replica_keys(layout, box.rank))) or "nothing"
            raise CheckpointError(
                f"{directory / INFO_NAME}: tensor {name!r}: rank {box.rank} is said to hold box "
                f"{_part_text(part)}, but under spec {layout.spec} it holds {own}; the info "
                "contradicts itself"
            )
    for part, ranks in holders.items():
        if part not in stored:
            some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
            who = f"rank {some}" if len(ranks) == 1 else f"ranks {some} all"
            raise CheckpointError(
                f"{directory}: tensor {name!r}: no file holds its box {_part_text(part)}, which "
                f"{who} held; restore that file or save again"
            )


def _read_header(path: Path, file: FileEntry, save: str) -> Header:
    """Return the header of a file that is the one of this save and rank."""
    if not path_exists(path):
        raise CheckpointError(
            f"{path}: the file of rank {file.rank} is missing; restore it or save again"
        )
    with SourceFile(path) as opened:
        header = read_header(opened)
    if header.file_bytes != file.num_bytes:
        raise CheckpointError(
            f"{path}: has {header.file_bytes} bytes but {INFO_NAME} says {file.num_bytes}; "
            f"{_CHANGED}"
        )
    for key, said in shard_metadata(save, file.rank).items():
        if header.metadata.get(key) != said:
            raise CheckpointError(
                f"{path}: its metadata says {key} {header.metadata.get(key)!r} but "
                f"{INFO_NAME} says {said!r}; the file belongs elsewhere, restore the right one"
            )
    return header


def _part_text(part: ReplicaKey) -> str:
    box, addend = part
    return f"{box_text(box)} of addend {list(addend)}" if addend else box_text(box)


def sharded_target(
    mesh: DeviceMesh,
    tensors: Sequence[OutputTensor],
    layouts: Mapping[str, Layout],
    save: str | None = None,
    file_metadata: Mapping[str, str] = MappingProxyType({}),
) -> Target:
    """Return the output that is a checkpoint as the ranks of a mesh would save it.

    Layouts by name in the output have no reductions pending. `save` names this save in all its
    files, `file_metadata` is what the source's safetensors files say besides their tensors.
    """
    token = save or os.urandom(8).hex()
    by_name = {tensor.name: tensor for tensor in tensors}
    assigned = assign_boxes(mesh, layouts)
    files: dict[int, OutputFile] = {}
    for rank in mesh.ids:
        # Let go of one by one: together they take as much memory as what is made of them.
        boxes = assigned.pop(rank)
        if boxes:
            files[rank] = _output_file(by_name, boxes, rank, token)

    def last(crcs: Mapping[str, Sequence[int]], put: Put) -> None:
        info = ShardingInfo(
            token, mesh, dict(sorted(layouts.items())), (), file_metadata=file_metadata
        )
        entries = (_entry(rank, file, crcs[file.name]) for rank, file in files.items())

        def fill(write: Write) -> None:
            for line in info_lines(info, entries):
                write(line.encode())

        put(INFO_NAME, fill)

    carried = frozenset(file_metadata)
    return Target(tuple(files.values()), directory=True, last=last, digested=True, carried=carried)


def _output_file(
    tensors: Mapping[str, OutputTensor], boxes: Sequence[BoxEntry], rank: int, save: str
) -> OutputFile:
    """Return the file of a rank, given its boxes by the names of their tensors."""
    unplaced = (Extent(tensors[entry.tensor], entry.box, 0) for entry in boxes)
    header = _header_of(unplaced, rank, save)[1]
    extents, offset = extent_columns(), header.entries[0].offset
    # A file has its tensors by dtype, and then in the order of the boxes.
    for dtype in dict.fromkeys(entry.dtype for entry in header.entries):
        for entry in boxes:
            if (tensor := tensors[entry.tensor]).dtype == dtype:
                extents.append(tensor, entry.box, offset)
                offset += box_size(entry.box) * item_bytes(dtype)
    assert offset == header.file_bytes, "boxes lie in the order of the header"
    # Made each time that it is asked for: all of them take much memory.
    raw = made_bytes(1, lambda _: RawBytes(0, _header_of(extents, rank, save)[0]))
    return OutputFile(f"shard-{rank:05d}-{save}.safetensors", header.file_bytes, raw, extents)


def _header_of(extents: Iterable[Extent], rank: int, save: str) -> tuple[bytes, Header]:
    slots = (
        TensorSlot(tensor.name, tensor.dtype, stored_shape([extent.box for extent in group]))
        for tensor, group in groupby(extents, attrgetter("tensor"))
    )
    return encode_header(slots, shard_metadata(save, rank))


def _entry(rank: int, file: OutputFile, crcs: Sequence[int]) -> FileEntry:
    """Return what the info says of a file; it lists boxes in the order of their names."""
    boxes = box_columns()
    for at in sorted(range(len(crcs)), key=lambda at: file.extents[at].tensor.name):
        extent = file.extents[at]
        boxes.append(extent.tensor.name, (extent.box, ()), crcs[at])
    return FileEntry(file.name, rank, file.num_bytes, boxes)
