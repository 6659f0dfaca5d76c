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

__all__ = ["NativeCatalog", "open_native", "shard_metadata", "sharded_target"]

_CHANGED: Final = "the file was changed, restore it"


def shard_metadata(save: str, rank: int) -> dict[str, str]:
    """Return what every file says about itself, so that a stray file is found out."""
    return {"format": "pt", "shardspec.rank": str(rank), SAVE_KEY: save}


class _Kind:
    """Tensors that are sharded alike, and of which the same files hold the same parts.

    Kinds are found box by box: each leads to those with one box more.
    """

    __slots__ = ("boxes", "layout", "more", "places")

    def __init__(self, layout: Layout, boxes: tuple[FileBox, ...], places: dict[int, int]) -> None:
        self.layout = layout
        self.boxes = boxes
        self.places = places
        """Of each file that holds boxes, which is its first, after which the others come."""
        self.more: dict[tuple[int, ReplicaKey], _Kind] = {}
        """By file and box, the kind with that one too."""

    def then(self, file: int, box: FileBox) -> "_Kind":
        """Return the kind with one box more, that of a file."""
        key = file, (box.box, box.addend)
        places = {file: len(self.boxes), **self.places}
        found = self.more[key] = _Kind(self.layout, (*self.boxes, box), places)
        return found

    def of_file(self, file: int) -> range:
        """Return which boxes a file holds."""
        first = self.places.get(file, len(self.boxes))
        end = first
        while end < len(self.boxes) and self.boxes[end].path == self.boxes[first].path:
            end += 1
        return range(first, end)


class NativeCatalog(Catalog):
    """A checkpoint that `save_sharded` wrote; made by `open_native`.

    Of each tensor its kind and of each box where it lies are kept, in columns; the values that
    describe it are made when they are asked for.
    """

    def __init__(self, directory: Path, info: ShardingInfo) -> None:
        paths = tuple(file_inside(directory, f.name, directory / INFO_NAME) for f in info.files)
        files = (directory / INFO_NAME, *paths)
        super().__init__(NATIVE, directory, info.tensors, files, info.mesh, info.values)
        self.file_metadata = FileMetadata(info.file_metadata)
        self.paths: Mapping[str, KeyPath] = info.paths
        """Names that were no keys of the state dict, but joined: the keys that led there."""
        self._tensors: dict[str, tuple[_Kind, int]] = {}
        """The kind of each tensor, and the place of its first box in the columns."""
        num_boxes = 0
        for name, kind in _kinds(info, paths, directory).items():
            self._tensors[name] = kind, num_boxes
            num_boxes += len(kind.boxes)
        self._offsets = array("q", [-1]) * num_boxes
        self._crcs = array("q", [-1]) * num_boxes
        looks = list(enumerate(zip(paths, info.files, strict=True)))
        with prefetch_map(
            looks, lambda at: _read_header(*at[1], info.save), prefetch_depth(directory)
        ) as headers:
            for number, (path, file) in looks:
                # One header at a time is kept.
                self._take(number, path, file, next(headers))

    def _take(self, number: int, path: Path, file: FileEntry, header: Header) -> None:
        """Note where the boxes of a file lie, once its header agrees with the info."""
        for entry in header.entries:
            kind, first = self._tensors.get(entry.name, (None, 0))
            places = range(0) if kind is None else kind.of_file(number)
            if kind is None or not places:
                raise CheckpointError(
                    f"{path}: holds tensor {shown(entry.name, 200)}, which {INFO_NAME} does not "
                    f"list for it; {_CHANGED}"
                )
            boxes, dtype = [kind.boxes[place].box for place in places], kind.layout.dtype
            shape = stored_shape(boxes)
            if entry.shape != shape:
                raise CheckpointError(
                    f"{path}: holds tensor {entry.name!r} of shape {list(entry.shape)}, but its "
                    f"box {' and '.join(map(box_text, boxes))} needs {list(shape)}; {_CHANGED}"
                )
            if entry.dtype != dtype:
                raise CheckpointError(
                    f"{path}: holds tensor {entry.name!r} as {entry.dtype}, but {INFO_NAME} says "
                    f"{dtype}; {_CHANGED}"
                )
            offset = entry.offset
            for place, box in zip(places, boxes, strict=True):
                self._offsets[first + place] = offset
                offset += box_size(box) * item_bytes(dtype)
        for name, entries in groupby(file.boxes, attrgetter("tensor")):
            kind, first = self._tensors[name]
            at = first + kind.places[number]
            if self._offsets[at] < 0:
                raise CheckpointError(
                    f"{path}: lacks tensor {name!r}, which {INFO_NAME} lists for it; {_CHANGED}"
                )
            for place, box_entry in enumerate(entries, at):
                if box_entry.crc32 is not None:
                    self._crcs[place] = box_entry.crc32

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor and its boxes, which are one object for tensors of one kind."""
        kind, _ = self._tensors[name]
        layout = kind.layout
        pending = stored_reductions(layout)
        return Outline(name, layout.global_shape, layout.dtype, layout.spec, pending, kind.boxes)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor and its boxes."""
        kind, at = self._tensors[name]
        layout, boxes = kind.layout, []
        for held in kind.boxes:
            offset, crc32 = self._offsets[at], self._crcs[at]
            num_bytes = box_size(held.box) * item_bytes(layout.dtype)
            digest = None if crc32 < 0 else Digest(crc32, offset, num_bytes)
            boxes.append(StoredBox(held.box, held.addend, held.rank, held.path, offset, digest))
            at += 1
        pending = stored_reductions(layout)
        return StoredTensor(
            name, layout.global_shape, layout.dtype, layout.spec, pending, tuple(boxes)
        )


def open_native(directory: Path) -> NativeCatalog:
    """Read the sharding info and the header of every file, and check that they agree."""
    return NativeCatalog(directory, read_info(directory))


def _kinds(info: ShardingInfo, paths: Sequence[Path], directory: Path) -> dict[str, _Kind]:
    """Return the kind of every tensor; all boxes that its spec gives to devices are there."""
    # Many tensors are sharded alike.
    keys_of = lru_cache(None)(replica_keys)
    bare = {layout: _Kind(layout, (), {}) for layout in info.tensors.values()}
    kinds = {name: bare[layout] for name, layout in info.tensors.items()}
    for number, (file, path) in enumerate(zip(info.files, paths, strict=True)):
        for name, box, addend, _ in file.boxes:
            kind = kinds[name]
            keys = keys_of(kind.layout, file.rank)
            if (box, addend) not in keys:
                holds = " and ".join(map(_key_text, keys)) or "nothing"
                raise CheckpointError(
                    f"{directory / INFO_NAME}: tensor {name!r}: rank {file.rank} is said to hold "
                    f"box {_key_text((box, addend))}, but under spec {kind.layout.spec} it holds "
                    f"{holds}; the info contradicts itself"
                )
            known = kind.more.get((number, (box, addend)))
            kinds[name] = known or kind.then(number, FileBox(box, addend, file.rank, path))
    checked: set[_Kind] = set()
    for name, kind in kinds.items():
        if kind in checked:
            continue
        checked.add(kind)
        found = {(box.box, box.addend) for box in kind.boxes}
        for key, ranks in replica_holders(kind.layout).items():
            if key not in found:
                raise CheckpointError(
                    f"{directory}: tensor {name!r}: no file holds its box {_key_text(key)}, "
                    f"which {_ranks_text(ranks)} held; restore that file or save again"
                )
    return kinds


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
    file_metadata: Mapping[str, str] = MappingProxyType({}),
) -> Target:
    """Return the output that is a checkpoint as the ranks of a mesh would save it.

    Layouts by name in the output have no reductions pending. `save` names this save in all its
    files, `file_metadata` is what the source's safetensors files say besides their tensors.

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
    ranks: list[int] = []
    files: list[OutputFile] = []

    def head_of(held: Iterable[BoxEntry | Extent], rank: int) -> tuple[bytes, Header]:
        slots = (
            TensorSlot(name, by_name[name].dtype, stored_shape([one.box for one in found]))
            for name, found in groupby(held, _name_of)
        )
        return encode_header(slots, shard_metadata(save, rank))

    def made(extents: Sequence[Extent], rank: int) -> Sequence[RawBytes]:
        # Made each time that it is asked for: all of them take much memory.
        return made_bytes(1, lambda _: RawBytes(0, head_of(extents, rank)[0]))

    assigned = assign_boxes(mesh, layouts)
    for rank in mesh.ids:
        # Let go of one by one: together they take as much memory as what is made of them.
        boxes = assigned.pop(rank)
        if not boxes:
            continue
        header = head_of(boxes, rank)[1]
        offset, file_bytes = header.entries[0].offset, header.file_bytes
        dtypes = dict.fromkeys(slot.dtype for slot in header.entries)
        del header
        extents = extent_columns()
        # A file has its tensors by dtype, and then in the order of the boxes.
        for dtype in dtypes:
            for entry in boxes:
                if (tensor := by_name[entry.tensor]).dtype == dtype:
                    extents.append(tensor, entry.box, offset)
                    offset += box_size(entry.box) * item_bytes(dtype)
        assert offset == file_bytes, "boxes lie in the order of the header"
        ranks.append(rank)
        name = f"shard-{rank:05d}-{save}.safetensors"
        files.append(OutputFile(name, file_bytes, made(extents, rank), extents))

    def last(crcs: Mapping[str, Sequence[int]], put: Put) -> None:
        def entry(rank: int, file: OutputFile) -> FileEntry:
            boxes = box_columns()
            found = crcs[file.name]
            # The info lists the boxes of a file in the order of their names.
            for at in sorted(range(len(found)), key=lambda at: _name_of(file.extents[at])):
                extent = file.extents[at]
                boxes.append(extent.tensor.name, (extent.box, ()), found[at])
            return FileEntry(file.name, rank, file.num_bytes, boxes)

        entries = (entry(rank, file) for rank, file in zip(ranks, files, strict=True))
        sorted_layouts = dict(sorted(layouts.items()))
        lines = info_lines(save, mesh, sorted_layouts, entries, file_metadata=file_metadata)

        def fill(write: Write) -> None:
            for line in lines:
                write(line.encode())

        put(INFO_NAME, fill)

    carried = frozenset(file_metadata)
    return Target(tuple(files), directory=True, last=last, digested=True, carried=carried)


def _name_of(held: BoxEntry | Extent) -> str:
    return held.tensor if isinstance(held, BoxEntry) else held.tensor.name
