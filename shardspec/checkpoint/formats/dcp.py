"""Reading the directories of `torch.distributed.checkpoint`: ``.metadata`` and ``*.distcp``.

The metadata says which chunks make up every tensor and in which file each lies. A chunk is a small
zip of its own, in which the tensor's bytes are read in place. Source: ``metadata.py``,
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
    StoredTensor,
    box_text,
)
from shardspec.checkpoint.formats.dcp_metadata import (
    Chunk,
    DcpMetadata,
    Item,
    TensorEntry,
    read_metadata,
)
from shardspec.checkpoint.formats.names import (
    DCP,
    DCP_OF_A_RANK,
    DCP_OWN_METADATA,
    METADATA_NAME,
)
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.torch_files.pickles import UnlistedNameError
from shardspec.checkpoint.torch_files.plain_values import plain_value
from shardspec.checkpoint.torch_files.torch_dtensors import read_dtensors
from shardspec.checkpoint.torch_files.torch_values import (
    TorchTensor,
    read_torch_pickle,
    tensor_place,
)
from shardspec.checkpoint.torch_files.torch_zip import read_torch_zip
from shardspec.dtypes import dtype_name
from shardspec.errors import CheckpointError, DTypeError

__all__ = ["DcpCheckpoint", "open_dcp"]

_MOST_KEPT: Final = 1024
"""Pickles of chunks whose meaning is kept: they differ only where shapes or dtypes do."""
_MOST_KEPT_BYTES: Final = 1024
"""Of each; torch writes some 200."""


class DcpCheckpoint(Catalog):
    """A `Catalog` over a directory of torch's; made by `open_dcp`."""

    def __init__(self, directory: Path, metadata: DcpMetadata, files: Mapping[str, Path]) -> None:
        # Names inside nested dicts and lists are joined by dots.
        super().__init__(
            DCP, directory, metadata.tensors, (directory / METADATA_NAME, *files.values())
        )
        self._directory = directory
        self._metadata = metadata
        self._files = files
        self._ranks = _ranks(files)
        self._tensors = LazyTensorCache(self._look_up)
        self._meant: dict[bytes, TorchTensor] = {}
        self._others: dict[str, object] | None = None

    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]]:
        """Where in nested dicts and lists an entry was, where the metadata says so."""
        return self._metadata.paths

    @property
    def extras(self) -> Mapping[str, object]:
        """Entries that are no tensors; read when they are first asked for.

        Raises
        ------
        CheckpointError
            If the bytes of one are damaged.
        """
        if self._others is None:
            self._others = {
                name: self._other(name, item) for name, item in self._metadata.extras.items()
            }
        return self._others

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor by the metadata alone.

        Raises
        ------
        CheckpointError
            If it is of a dtype that is not supported.
        """
        entry = self._metadata.tensors[name]
        ranks, files = self._ranks, self._files
        boxes = tuple(
            FileBox(chunk.box, (), ranks[item.file], files[item.file])
            for chunk in entry.chunks
            for item in (chunk.item,)
        )
        return Outline(name, entry.shape, self._dtype(name, entry), None, (), boxes)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor; the headers of its chunks are read, and checked against the metadata.

        Raises
        ------
        CheckpointError
            If a chunk is damaged, or is not what the metadata says.
        """
        return self._tensors(name)

    def origin(self, name: str) -> Hashable:
        """Return where its chunks lie, by the metadata."""
        chunks = self._metadata.tensors[name].chunks
        return frozenset((chunk.item.file, chunk.item.offset, chunk.box) for chunk in chunks)

    def copies_agree(self, name: str) -> bool:  # noqa: ARG002
        """Say no: the metadata has no digests."""
        return False

    def _dtype(self, name: str, entry: TensorEntry) -> str:
        try:
            return dtype_name(entry.dtype)
        except DTypeError:
            raise CheckpointError(
                f"{self._directory}: tensor {name!r} is of dtype {entry.dtype}, which is not "
                "supported; cast it before saving, or leave it out"
            ) from None

    def _look_up(self, name: str) -> StoredTensor:
        entry = self._metadata.tensors[name]
        dtype = self._dtype(name, entry)
        look = partial(self._box, name, dtype)
        with prefetch_map(entry.chunks, look, prefetch_depth(self._directory)) as boxes:
            return StoredTensor(name, entry.shape, dtype, None, (), tuple(boxes))

    def _box(self, name: str, dtype: str, chunk: Chunk) -> StoredBox:
        path = self._files[chunk.item.file]
        what = f"{path}: tensor {name!r}, box {box_text(chunk.box)}"
        with SourceFile(path) as file:
            found = read_torch_zip(file, chunk.item.offset, chunk.item.num_bytes, what)
            value = self._value(found.pickle(file), what)
            _check(value, dtype, chunk.box, what)
            place = tensor_place(value, file, found)
        rank = self._ranks[chunk.item.file]
        return StoredBox(chunk.box, (), rank, path, place.offset, place.digest, place.strides)

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

    def _other(self, name: str, item: Item) -> object:
        path = self._files[item.file]
        with SourceFile(path) as file:
            found = read_torch_zip(file, item.offset, item.num_bytes, f"{path}: entry {name!r}")
            try:
                return plain_value(read_dtensors(file, found))
            except UnlistedNameError as error:
                return OpaqueValue(f"an object that is not read: {error}")


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
    metadata = read_metadata(path)
    items: dict[str, list[Item]] = {}
    for item in metadata.items:
        items.setdefault(item.file, []).append(item)
    files = {name: file_inside(directory, name, path) for name in sorted(items)}
    # Of replicas, which older versions can be told to keep, only one place is listed.
    exact = not any(entry.repeated for entry in metadata.tensors.values())
    for name, listed in items.items():
        _check_file(files[name], listed, exact=exact)
    return DcpCheckpoint(directory, metadata, files)


def _ranks(files: Mapping[str, Path]) -> dict[str, int]:
    """Return the rank that wrote each file, as its name says; else its place among the files."""
    ranks = {}
    for place, name in enumerate(files):
        match = DCP_OF_A_RANK.fullmatch(name)
        ranks[name] = place if match is None else int(match[1])
    return ranks


def _check_file(path: Path, items: list[Item], *, exact: bool) -> None:
    if not path_exists(path):
        raise CheckpointError(
            f"{path}: is missing, but {METADATA_NAME} lists {len(items)} entries in it; restore it "
            "or save again"
        )
    with SourceFile(path) as file:
        num_bytes = file.num_bytes
    end = 0
    for item in sorted(items, key=lambda item: item.offset):
        if item.offset < end:
            raise CheckpointError(
                f"{path.parent / METADATA_NAME}: two entries in {path.name} share byte "
                f"{item.offset}; the metadata contradicts itself"
            )
        end = item.offset + item.num_bytes
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


def _check(value: TorchTensor, dtype: str, box: Box, what: str) -> None:
    """Compare a tensor in its file with what the metadata says of it."""
    if (value.dtype, value.shape) != (dtype, box_shape(box)):
        raise CheckpointError(
            f"{what}: is {list(value.shape)} of {value.dtype} there, but {METADATA_NAME} says "
            f"{list(box_shape(box))} of {dtype}; the file is from another save, restore the right "
            "one"
        )
