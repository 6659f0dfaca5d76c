"""What is in a checkpoint, without its data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import (
    Catalog,
    FileBox,
    OpaqueValue,
    Outline,
    StoredTensor,
)
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.tiling import MemoizedByBoxes, check_tiling
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

__all__ = ["CheckpointSummary", "TensorSummary", "inspect_checkpoint", "other_text"]

_LONG: Final = 200


@dataclass(frozen=True, slots=True)
class _Holders:
    """Who holds what, by a layout or as stored."""

    cells: Mapping[Box, tuple[int, ...]]
    """Every box that is not empty, and its ranks."""
    replicated: bool
    """Whether any box has several ranks."""
    uneven: bool
    """Whether not all boxes have the same shape, or, by a layout, some rank holds none while others
    do."""


def _holders_of(held: Iterable[tuple[int, Box]], num_ranks: int = 0) -> _Holders:
    """Return who holds what, given rank and box, of which some may be empty."""
    found: dict[Box, dict[int, None]] = {}
    for rank, box in held:
        if box_size(box):
            found.setdefault(box, {})[rank] = None
    cells = {box: tuple(ranks) for box, ranks in found.items()}
    shapes = {box_shape(box) for box in cells}
    busy = {rank for ranks in cells.values() for rank in ranks}
    return _Holders(
        MappingProxyType(cells),
        any(len(ranks) > 1 for ranks in cells.values()),
        len(shapes) > 1 or (bool(shapes) and len(busy) < num_ranks),
    )


@lru_cache(maxsize=64)
def _holders_by(layout: Layout) -> _Holders:
    """Return who holds what: once for the many tensors that are sharded alike."""
    boxes = layout.boxes()
    return _holders_of(boxes.items(), len(boxes))


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor of a checkpoint."""

    outline: Outline[FileBox]
    layout: Layout | None
    """How it is sharded over the mesh that wrote it, where the format says both."""
    source: Catalog
    """The checkpoint."""

    @property
    def stored(self) -> StoredTensor:
        """The tensor with the places of its boxes, for which files may have to be looked into.

        Raises
        ------
        CheckpointError
            If what is found there is damaged.
        """
        return self.source.tensor(self.outline.name)

    def file(self, box: FileBox) -> str:
        """Name the file of one of its boxes, from the directory on."""
        return _file(box.path, self.source.directory)

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return prod(self.outline.shape) * item_bytes(self.outline.dtype)

    @property
    def cells(self) -> Mapping[Box, tuple[int, ...]]:
        """Every box and the ranks that hold it: by the layout where it is known, else as stored."""
        return self._holders.cells

    @property
    def _holders(self) -> _Holders:
        if self.layout is not None:
            return _holders_by(self.layout)
        return _holders_of((stored.rank, stored.box) for stored in self.outline.boxes)

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold any box."""
        return self._holders.replicated

    @property
    def uneven(self) -> bool:
        """Whether not all boxes have the same shape, or, by the layout, some rank holds none."""
        return self._holders.uneven

    def has(self, index: Sequence[int]) -> bool:
        """Whether an index, one position for each of the first dims, lies in its shape."""
        shape = self.outline.shape
        return len(index) <= len(shape) and all(
            0 <= at < size for at, size in zip(index, shape, strict=False)
        )

    def holders(self, index: Sequence[int]) -> dict[Box, tuple[int, ...]]:
        """Return the boxes that hold a part of an index, and their ranks.

        Parameters
        ----------
        index
            One position for each of the first dims; the others are taken whole.

        Raises
        ------
        CheckpointError
            If it has more positions than there are dims, or one is outside.
        """
        if not self.has(index):
            raise CheckpointError(
                f"tensor {self.outline.name!r}: index {list(index)} does not lie in the shape "
                f"{list(self.outline.shape)}"
            )
        return {
            box: ranks
            for box, ranks in self.cells.items()
            if all(lo <= at < hi for at, (lo, hi) in zip(index, box, strict=False))
        }

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its boxes on disk; more than the whole where reductions are pending."""
        return sum(self.box_bytes(box) for box in self.outline.boxes)

    def box_bytes(self, box: FileBox) -> int:
        """Bytes of one of its boxes."""
        return box_size(box.box) * item_bytes(self.outline.dtype)

    def to_json(self) -> dict[str, object]:
        """Return the summary as plain values."""
        holders = self._holders
        return {
            "name": self.outline.name,
            "shape": list(self.outline.shape),
            "dtype": self.outline.dtype,
            "spec": None if self.outline.spec is None else str(self.outline.spec),
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
                    "bytes": self.box_bytes(box),
                }
                for box in self.stored.boxes
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

    @property
    def _boxes(self) -> Iterable[tuple[Sequence[FileBox], int]]:
        """All boxes, those that tensors have in common once, and the bytes of one element of all.

        A million boxes take seconds to go through.
        """
        found: dict[int, tuple[Sequence[FileBox], int]] = {}
        for tensor in self.tensors:
            boxes = tensor.outline.boxes
            _, size = found.get(id(boxes), (boxes, 0))
            found[id(boxes)] = boxes, size + item_bytes(tensor.outline.dtype)
        return found.values()

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """Bytes of the boxes that each device of the mesh stored."""
        stored: dict[int, int] = {} if self.mesh is None else dict.fromkeys(self.mesh.ids, 0)
        for boxes, size in self._boxes:
            for box in boxes:
                stored[box.rank] = stored.get(box.rank, 0) + size * box_size(box.box)
        return stored if self.mesh is not None else dict(sorted(stored.items()))

    @property
    def files_by_rank(self) -> dict[int, str]:
        """Name of the file of each device that stored any box."""
        paths = {box.rank: box.path for boxes, _ in self._boxes for box in boxes}
        return {rank: _file(path, self.directory) for rank, path in paths.items()}

    def to_json(self) -> dict[str, object]:
        """Return the summary as plain values."""
        files = self.files_by_rank
        return {
            "directory": str(self.directory),
            "format": self.format,
            "mesh": None if self.mesh is None else _mesh_json(self.mesh),
            "bytes": self.num_bytes,
            "ranks": [
                {"rank": rank, "bytes": num_bytes, "file": files.get(rank)}
                for rank, num_bytes in self.bytes_by_rank.items()
            ],
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "others": {name: other_text(value) for name, value in self.extras.items()},
        }


@lru_cache(maxsize=1024)
def _file(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory)) if directory in path.parents else path.name


def other_text(value: object, most: int = _LONG) -> str:
    """Return a value that is no tensor as text, cut short if it is longer than `most`.

    Examples
    --------
    >>> other_text({"lr": [0.1, OpaqueValue("2 bytes")]}), other_text("a long text", 8)
    ("{'lr': [0.1, <2 bytes>]}", "'a long…")
    """
    text = value.text if isinstance(value, OpaqueValue) else repr(_marked(value))
    return text if len(text) <= most else f"{text[: most - 1]}…"


class _Marked(str):
    """Text that stands for something else, and so without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _marked(value: object) -> object:
    """Return a value in which descriptions stand in angle brackets."""
    match value:
        case OpaqueValue():
            return _Marked(value.text if value.text.startswith("<") else f"<{value.text}>")
        case list():
            return [_marked(item) for item in value]
        case tuple():
            return tuple(_marked(item) for item in value)
        case dict():
            return {_marked(key): _marked(item) for key, item in value.items()}
        case _:
            return value


def _mesh_json(mesh: DeviceMesh) -> dict[str, object]:
    return {
        "ids": list(mesh.ids),
        "shape": list(mesh.shape),
        "axis_names": None if mesh.axis_names is None else list(mesh.axis_names),
    }


def inspect_checkpoint(directory: Path | str | Catalog) -> CheckpointSummary:
    """Return what a checkpoint holds, by what describes it; its data is not read.

    Parameters
    ----------
    directory
        Where it lies, or what `open_checkpoint` has made of it.

    Raises
    ------
    CheckpointError
        If the checkpoint is missing, unfinished, damaged or contradicts itself.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import DTensor, save_sharded
    >>> path = tempfile.mkdtemp()
    >>> w = DTensor(torch.zeros(3, 2), DeviceMesh(range(2), (2,)), "[S0,R]")
    >>> save_sharded({"w": w}, path)
    >>> inspect_checkpoint(path).bytes_by_rank
    {0: 16, 1: 8}
    """
    source = as_catalog(directory)
    layouts: dict[object, Layout] = {}
    tensors = tuple(_summary(source, name, layouts) for name in source.names)
    # Many tensors are sharded alike.
    check = MemoizedByBoxes(partial(check_tiling, tiled=set()))
    for tensor in tensors:
        check(tensor.outline)
    return CheckpointSummary(
        source.directory, source.format, source.mesh, tensors, dict(source.extras)
    )


def _summary(source: Catalog, name: str, layouts: dict[object, Layout]) -> TensorSummary:
    """Return what is known of a tensor; many have the same layout."""
    outline = source.outline(name)
    if source.mesh is None or outline.spec is None:
        return TensorSummary(outline, None, source)
    alike = outline.spec, outline.shape, outline.dtype
    if alike not in layouts:
        layouts[alike] = Layout(source.mesh, *alike)
    return TensorSummary(outline, layouts[alike], source)
