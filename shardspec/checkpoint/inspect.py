"""What is in a checkpoint, without its data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh


class Holders(NamedTuple):
    """Which ranks hold which boxes: by the layout if it is known, else as stored."""

    cells: Mapping[Box, tuple[int, ...]]
    """Every box that is not empty, and its ranks."""
    replicated: bool
    """Whether any box has several ranks."""
    uneven: bool
    """Whether boxes differ in shape, or, by a layout, some ranks hold none while others do."""


def _holders(held: Iterable[tuple[Box, int]], num_ranks: int = 0) -> Holders:
    """Return who holds what; of `num_ranks` ranks, if they are known."""
    found: dict[Box, dict[int, None]] = {}
    for box, rank in held:
        found.setdefault(box, {})[rank] = None
    cells = {box: tuple(ranks) for box, ranks in found.items()}
    busy = len({rank for ranks in cells.values() for rank in ranks})
    uneven = len(set(map(box_shape, cells))) > 1 or 0 < busy < num_ranks
    return Holders(cells, any(len(ranks) > 1 for ranks in cells.values()), uneven)


@lru_cache(maxsize=64)
def _holders_by(layout: Layout) -> Holders:
    ids = layout.mesh.ids
    return _holders(((box, i) for i in ids for box, _ in replica_keys(layout, i)), len(ids))


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor of a checkpoint, which is asked each time for what describes it."""

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
        """The tensor with the places of its boxes; may read headers."""
        return self.source.tensor(self.name)

    def file(self, box: FileBox) -> str:
        """Return the path of the file of one of its boxes, relative to the checkpoint."""
        return _file(box.path, self.source.directory)

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return self.outline.num_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its boxes on disk; more than `num_bytes` if reductions are pending."""
        outline = self.outline
        return sum(box_size(box.box) for box in outline.boxes) * item_bytes(outline.dtype)

    @property
    def holders(self) -> Holders:
        """Every box and the ranks that hold it."""
        if self.layout is not None:
            return _holders_by(self.layout)
        return _holders((stored.box, stored.rank) for stored in self.outline.boxes)

    def holders_at(self, index: Sequence[int]) -> dict[Box, tuple[int, ...]]:
        """Return the boxes with a part of an index of the first dims, and their ranks, if any."""
        if len(index) > len(self.outline.shape):
            return {}
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
    """A checkpoint: its format, mesh and tensors, and how much each rank stored."""

    directory: Path
    format: str
    """What wrote it."""
    mesh: DeviceMesh | None
    """The devices that wrote it, where the format says so."""
    tensors: tuple[TensorSummary, ...]
    """Sorted by name."""
    extras: Mapping[str, object]
    """Entries that are not tensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all whole tensors: about the size of the merged file."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def _boxes(self) -> Iterable[tuple[Sequence[FileBox], int]]:
        """Return all tuples of boxes, each once, and the bytes of one element of their tensors."""
        found: dict[int, tuple[Sequence[FileBox], int]] = {}
        for tensor in self.tensors:
            outline = tensor.outline
            _, size = found.get(id(outline.boxes), ((), 0))
            found[id(outline.boxes)] = outline.boxes, size + item_bytes(outline.dtype)
        return found.values()

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
        """Return all but the tensors as plain values."""
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
    """Return a value that is not a tensor as text of at most `most` characters."""
    text = value.text if isinstance(value, OpaqueValue) else repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def inspect_checkpoint(directory: Path | str | Catalog) -> CheckpointSummary:
    """Return what a checkpoint holds; its metadata is checked, its data is not read."""
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
