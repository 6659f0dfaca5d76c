"""Reading the directories of `torch.distributed.checkpoint`: ``.metadata`` and ``*.distcp``.

The metadata, a pickle, says which chunks make up every tensor and in which file each lies. A chunk
is a small zip of its own, in which the tensor's bytes are read in place. Source: ``metadata.py``,
``filesystem.py`` and ``default_planner.py`` of ``torch/distributed/checkpoint``.

Nothing in a file names its rank, and the metadata has no digests. So a file in the place of another
is found by the lengths, shapes and dtypes of its chunks. **That files were swapped or copied cannot
be told where these are equal.**
"""

from collections.abc import Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from shardspec.boxes import Box, box_shape
from shardspec.checkpoint.catalog import (
    Catalog,
    FileBox,
    LazyTensorCache,
    OpaqueValue,
    Outline,
    StoredBox,
    StoredObject,
    StoredTensor,
    box_text,
)
from shardspec.checkpoint.formats.dcp_metadata import (
    DcpChunk,
    DcpEntry,
    DcpMetadata,
    DcpPlace,
    read_metadata,
)
from shardspec.checkpoint.formats.megatron_core import MEGATRON_OBJECT, boxes_of_stretch
from shardspec.checkpoint.formats.names import (
    DCP,
    DCP_OF_A_RANK,
    DCP_OWN_METADATA,
    METADATA_NAME,
)
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.state import plain_value
from shardspec.checkpoint.torch_files.unpickler import UnlistedNameError
from shardspec.checkpoint.torch_files.values import (
    TorchTensor,
    read_torch_pickle,
    tensor_place,
)
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError

__all__ = ["DcpCheckpoint", "open_dcp"]

_MOST_KEPT: Final = 1024
"""Pickles of chunks whose meaning is kept: they differ only where shapes or dtypes do."""
_MOST_OBJECT_BYTES: Final = 2**26
_MOST_KEPT_BYTES: Final = 1024
"""Of each; torch writes some 200."""


class DcpCheckpoint(Catalog):
    """A `Catalog` over a directory of torch's; made by `open_dcp`."""

    def __init__(self, directory: Path, said: DcpMetadata, files: dict[str, Path]) -> None:
        # Names inside nested dicts and lists are joined by dots.
        super().__init__(DCP, directory, said.tensors, (directory / METADATA_NAME, *files.values()))
        self._entries = said.tensors
        self._other_places = said.others
        self.paths = said.paths
        # Megatron loads these by their names alone, and what is in them is its own affair.
        self.objects = {
            name: StoredObject(files[place.file], place.offset, place.num_bytes)
            for name, place in said.others.items()
            if MEGATRON_OBJECT.search(name) and place.num_bytes <= _MOST_OBJECT_BYTES
        }
        """Where in nested dicts and lists an entry was, where the metadata says so."""
        self._files = files
        # A file is its rank's, as its name says, or else of its place among the files.
        matches = {name: DCP_OF_A_RANK.fullmatch(name) for name in files}
        self._ranks = {
            name: at if match is None else int(match[1])
            for at, (name, match) in enumerate(matches.items())
        }
        self._tensors = LazyTensorCache(self._look_up)
        self._meant: dict[bytes, TorchTensor] = {}
        self._others: dict[str, object] | None = None

    @property
    def extras(self) -> Mapping[str, object]:
        """Entries that are no tensors; read when they are first asked for."""
        if self._others is None:
            self._others = {
                name: self._other(name, place) for name, place in self._other_places.items()
            }
        return self._others

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor by the metadata alone."""
        entry = self._entries[name]
        boxes = tuple(
            FileBox(box, (), self._ranks[place.file], self._files[place.file])
            for whole, place in entry.chunks
            for box, _ in _boxes(entry, whole)
        )
        return Outline(name, entry.shape, self._dtype(name, entry), None, (), boxes)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor; the headers of its chunks are read, and checked against the metadata."""
        return self._tensors(name)

    def origin(self, name: str) -> Hashable:
        """Return where its chunks lie, by the metadata."""
        chunks = self._entries[name].chunks
        return frozenset((place.file, place.offset, box) for box, place in chunks)

    def _dtype(self, name: str, entry: DcpEntry) -> str:
        try:
            return dtype_name(entry.dtype)
        except DTypeError:
            raise CheckpointError(
                f"{self.directory}: tensor {name!r} is of dtype {entry.dtype}, which is not "
                "supported; cast it before saving, or leave it out"
            ) from None

    def _look_up(self, name: str) -> StoredTensor:
        entry = self._entries[name]
        dtype = self._dtype(name, entry)
        look = partial(self._chunk, name, dtype)
        with prefetch_map(entry.chunks, look, prefetch_depth(self.directory)) as chunks:
            boxes = tuple(box for chunk in chunks for box in chunk)
            return StoredTensor(name, entry.shape, dtype, None, (), boxes)

    def _chunk(self, name: str, dtype: str, chunk: DcpChunk) -> list[StoredBox]:
        box, (in_file, offset, num_bytes) = chunk
        path = self._files[in_file]
        what = f"{path}: tensor {name!r}, box {box_text(box)}"
        with SourceFile(path) as file:
            found = read_torch_zip(file, offset, num_bytes, what)
            value = self._value(found.pickle(file), what)
            if (value.dtype, value.shape) != (dtype, box_shape(box)):
                raise CheckpointError(
                    f"{what}: is {list(value.shape)} of {value.dtype} there, but {METADATA_NAME} "
                    f"says {list(box_shape(box))} of {dtype}; the file is from another save, "
                    "restore the right one"
                )
            place = tensor_place(value, file, found)
        rank, entry = self._ranks[in_file], self._entries[name]
        if entry.block is None:
            return [StoredBox(box, (), rank, path, place.offset, place.digest, place.strides)]
        if place.strides is not None:
            raise CheckpointError(f"{what}: a stretch of a flat tensor has strides; it is damaged")
        size = item_bytes(dtype)
        return [
            StoredBox(part, (), rank, path, place.offset + start * size, place.digest)
            for part, start in _boxes(entry, box)
        ]

    def _value(self, data: bytes, what: str) -> TorchTensor:
        """Return what the pickle of a chunk says; pickles of the same bytes say the same."""
        known = self._meant.get(data)
        if known is not None:
            return known
        value = read_torch_pickle(data, what)
        if not isinstance(value, TorchTensor):
            raise CheckpointError(
                f"{what}: holds a {type(value).__name__}, not a tensor; the file is damaged or "
                "from another save"
            )
        if len(data) <= _MOST_KEPT_BYTES and len(self._meant) < _MOST_KEPT:
            self._meant[data] = value
        return value

    def _other(self, name: str, place: DcpPlace) -> object:
        path = self._files[place.file]
        what = f"{path}: entry {name!r}"
        with SourceFile(path) as file:
            found = read_torch_zip(file, place.offset, place.num_bytes, what)
            try:
                return plain_value(read_torch(found, found.pickle(file)))
            except UnlistedNameError as error:
                return OpaqueValue(f"an object that is not read: {error}")


def _boxes(entry: DcpEntry, chunk: Box) -> list[tuple[Box, int]]:
    """Return the boxes of the tensor that a chunk holds, and how many elements come before each."""
    return [(chunk, 0)] if entry.block is None else boxes_of_stretch(entry.block, chunk)


def open_dcp(directory: Path) -> DcpCheckpoint:
    """Read the metadata, and check that the files it names are there and of the right length.

    Raises
    ------
    CheckpointError
        If the metadata is missing, damaged, contradicts itself or would run code; if a file is
        missing, too short or too long, or named so that it would lie elsewhere; or if chunks were
        transformed when they were written, or share bytes.
    """
    path = file_inside(directory, METADATA_NAME, directory)
    if not path_exists(path):
        own = any(DCP_OWN_METADATA.fullmatch(other.name) for other in directory.iterdir())
        raise CheckpointError(
            f"{directory}: has no {METADATA_NAME}, "
            + (
                "each rank has one of its own; save with use_collectives=True"
                if own
                else "which is written last; the save did not finish"
            )
        )
    said = read_metadata(path)
    files = {name: file_inside(directory, name, path) for name in sorted(said.by_file)}
    # Of replicas, which older versions can be told to keep, only one place is listed.
    exact = not any(entry.repeated for entry in said.tensors.values())
    for name, inside in said.by_file.items():
        _check_file(files[name], inside, exact=exact)
    return DcpCheckpoint(directory, said, files)


def _check_file(path: Path, places: list[DcpPlace], *, exact: bool) -> None:
    if not path_exists(path):
        raise CheckpointError(
            f"{path}: is missing, but {METADATA_NAME} lists {len(places)} entries in it; restore "
            "it or save again"
        )
    with SourceFile(path) as file:
        num_bytes = file.num_bytes
    end = 0
    for place in sorted(places, key=lambda place: place.offset):
        if place.offset < end:
            raise CheckpointError(
                f"{path.parent / METADATA_NAME}: two entries in {path.name} share byte "
                f"{place.offset}; the metadata contradicts itself"
            )
        end = place.offset + place.num_bytes
    if end > num_bytes:
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, but {METADATA_NAME} lists entries up to byte {end}; "
            "it was cut short, restore it"
        )
    if exact and end < num_bytes:
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, but {METADATA_NAME} lists none after byte {end}; it "
            "is of another rank or another save, restore the right one"
        )
