"""A checkpoint whose tensors were all listed when it was opened; most formats are read so."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardspec.checkpoint.reading.source import AllKnown, StoredBox, StoredTensor
from shardspec.mesh import DeviceMesh

__all__ = ["ListedCheckpoint", "whole_tensor"]


@dataclass(frozen=True, slots=True)
class ListedCheckpoint(AllKnown):
    """A `CheckpointSource` that holds what it says."""

    format: str
    """What wrote it."""
    directory: Path
    """Where it lies."""
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]
    """Every file it consists of."""
    mesh: DeviceMesh | None = None
    """The devices that wrote it, where the format says so."""
    others: Mapping[str, object] = field(default_factory=dict)
    """Entries that are no tensors."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor, sorted."""
        return tuple(sorted(self.tensors))

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor and its boxes."""
        return self.tensors[name]


def whole_tensor(
    name: str, shape: tuple[int, ...], dtype: str, path: Path, offset: int
) -> StoredTensor:
    """Return a tensor that lies whole, row-major, at a place in one file.

    Examples
    --------
    >>> whole_tensor("w", (2, 3), "int8", Path("x"), 8).boxes[0].box
    ((0, 2), (0, 3))
    """
    whole = tuple((0, size) for size in shape)
    boxes = () if 0 in shape else (StoredBox(whole, (), 0, path, offset),)
    return StoredTensor(name, shape, dtype, None, (), boxes)
