"""What is in a checkpoint, without its data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import (
    Catalog,
    FileBox,
    OpaqueValue,
    Outline,
    StoredTensor,
    replica_keys,
)
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.tiling import check_tiling, memoize_by_boxes
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

_MOST_KEPT: Final = 64
"""Boxes of several tensors that are kept at a time; most have them in common."""


class Holders(NamedTuple):
    """Which ranks hold what: by the layout where it is known, else as stored."""

    cells: Mapping[Box, tuple[int, ...]]
    """Every box that is not empty, and its ranks."""
    replicated: bool
    """Whether any box has several ranks."""
    uneven: bool
    """Whether not all boxes have the same shape, or, by a layout, some rank holds none while others
    do."""


def _holders_of(held: Iterable[tuple[int, Box]], num_ranks: int = 0) -> Holders:
    """Return who holds what, given rank and box, of which some may be empty."""
    found: dict[Box, dict[int, None]] = {}
    for rank, box in held:
        if box_size(box):
            found.setdefault(box, {})[rank] = None
    cells = {box: tuple(ranks) for box, ranks in found.items()}
    shapes = {box_shape(box) for box in cells}
    busy = {rank for ranks in cells.values() for rank in ranks}
    replicated = any(len(ranks) > 1 for ranks in cells.values())
    return Holders(cells, replicated, len(shapes) > 1 or (bool(shapes) and len(busy) < num_ranks))


@lru_cache(maxsize=64)
def _holders_by(layout: Layout) -> Holders:
    """Return who holds what: once for the many tensors that are sharded alike."""
    ids = layout.mesh.ids
    return _holders_of(((i, box) for i in ids for box, _ in replica_keys(layout, i)), len(ids))


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor of a checkpoint; what describes it is asked of the checkpoint each time."""

    name: str
    layout: Layout | None
    """How it is sharded over the mesh that wrote it, where the format says both."""
    source: Catalog
    """The checkpoint."""

    @property
    def outline(self) -> Outline[FileBox]:
        """Shape, dtype and boxes."""
        return self.source.outline(self.name)

    @property
    def stored(self) -> StoredTensor:
        """The tensor with the places of its boxes, for which files may have to be looked into."""
        return self.source.tensor(self.name)

    def file(self, box: FileBox) -> str:
        """Name the file of one of its boxes, from the directory on."""
        return _file(box.path, self.source.directory)

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        outline = self.outline
        return prod(outline.shape) * item_bytes(outline.dtype)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its boxes on disk; more than the whole where reductions are pending."""
        outline = self.outline
        return sum(box_size(box.box) for box in outline.boxes) * item_bytes(outline.dtype)

    @property
    def holders(self) -> Holders:
        """Every box and the ranks that hold it."""
        if self.layout is not None:
            return _holders_by(self.layout)
        return _holders_of((stored.rank, stored.box) for stored in self.outline.boxes)

    def has(self, index: Sequence[int]) -> bool:
        """Whether an index, one position for each of the first dims, lies in its shape."""
        shape = self.outline.shape
        return len(index) <= len(shape) and all(
            0 <= at < size for at, size in zip(index, shape, strict=False)
        )

    def holders_at(self, index: Sequence[int]) -> dict[Box, tuple[int, ...]]:
        """Return the boxes that hold a part of an index, other dims taken whole, and ranks."""
        if not self.has(index):
            raise CheckpointError(
                f"tensor {self.name!r}: index {list(index)} does not lie in the shape "
                f"{list(self.outline.shape)}"
            )
        return {
            box: ranks
            for box, ranks in self.holders.cells.items()
            if all(lo <= at < hi for at, (lo, hi) in zip(index, box, strict=False))
        }

    def to_json(self) -> dict[str, object]:
        """Return the summary as plain values."""
        stored, holders = self.stored, self.holders
        size = item_bytes(stored.dtype)
        return {
            "name": self.name,
            "shape": list(stored.shape),
            "dtype": stored.dtype,
            "spec": None if stored.spec is None else str(stored.spec),
            "bytes": self.num_bytes,
            "stored_bytes": self.stored_bytes,
            "replicated": holders.replicated,
            "uneven": holders.uneven,
            "boxes": [
                {
                    "box": [list(side) for side in box.box],
                    "addend": list(box.addend),
                    "rank": box.rank,
                    "file": self.file(box),
                    "offset": box.offset,
                    "bytes": box_size(box.box) * size,
                }
                for box in stored.boxes
            ],
        }


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint: who wrote it, its tensors, and how much each rank stored."""

    directory: Path
    format: str
    """What wrote it."""
    mesh: DeviceMesh | None
    """The devices that wrote it, where the format says so."""
    tensors: tuple[TensorSummary, ...]
    """Sorted by name."""
    extras: Mapping[str, object]
    """Entries that are no tensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all whole tensors: about the size of the merged file."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def _boxes(self) -> Iterator[tuple[Sequence[FileBox], int]]:
        """Yield all boxes, and the bytes of one element of all tensors that have them in common.

        A million boxes take seconds to go through.
        """
        found: dict[int, tuple[Sequence[FileBox], int]] = {}
        for tensor in self.tensors:
            outline = tensor.outline
            boxes = outline.boxes
            if id(boxes) not in found and len(found) == _MOST_KEPT:
                yield from found.values()
                found.clear()
            _, size = found.get(id(boxes), (boxes, 0))
            found[id(boxes)] = boxes, size + item_bytes(outline.dtype)
        yield from found.values()

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """Bytes of the boxes that each device of the mesh stored."""
        stored: dict[int, int] = {} if self.mesh is None else dict.fromkeys(self.mesh.ids, 0)
        for boxes, size in self._boxes():
            for box in boxes:
                stored[box.rank] = stored.get(box.rank, 0) + size * box_size(box.box)
        return stored if self.mesh is not None else dict(sorted(stored.items()))

    @property
    def files_by_rank(self) -> dict[int, str]:
        """Name of the file of each device that stored any box."""
        paths = {box.rank: box.path for boxes, _ in self._boxes() for box in boxes}
        return {rank: _file(path, self.directory) for rank, path in paths.items()}

    def facts(self) -> dict[str, object]:
        """Return what is said of the checkpoint, but for its tensors, as plain values."""
        files, mesh = self.files_by_rank, self.mesh
        by_rank = self.bytes_by_rank.items()
        return {
            "directory": str(self.directory),
            "format": self.format,
            "mesh": mesh and {"ids": mesh.ids, "shape": mesh.shape, "axis_names": mesh.axis_names},
            "bytes": self.num_bytes,
            "ranks": [{"rank": n, "bytes": size, "file": files.get(n)} for n, size in by_rank],
            "others": {name: other_text(value) for name, value in self.extras.items()},
        }


@lru_cache(maxsize=1024)
def _file(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory)) if directory in path.parents else path.name


def other_text(value: object, most: int = 200) -> str:
    """Return a value that is no tensor as text, cut short if it is longer than `most`."""
    text = value.text if isinstance(value, OpaqueValue) else repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def inspect_checkpoint(directory: Path | str | Catalog) -> CheckpointSummary:
    """Return what a checkpoint holds, by what describes it, which is checked; no data is read."""
    source = as_catalog(directory)
    # Many tensors are sharded alike.
    check = memoize_by_boxes(check_tiling)
    layout_of = lru_cache(None)(Layout)
    tensors = []
    for name in source.names:
        outline = source.outline(name)
        layout = None
        if source.mesh is not None and outline.spec is not None:
            layout = layout_of(source.mesh, outline.spec, outline.shape, outline.dtype)
        tensors.append(TensorSummary(name, layout, source))
        check(outline)
    extras = dict(source.extras)
    return CheckpointSummary(source.directory, source.format, source.mesh, tuple(tensors), extras)
