"""What is in a checkpoint, without its data."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from shardspec.boxes import box_size
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.source import StoredBox, StoredTensor
from shardspec.checkpoint.tiling import check_tiling
from shardspec.dtypes import item_bytes
from shardspec.mesh import DeviceMesh

__all__ = ["CheckpointSummary", "TensorSummary", "inspect_checkpoint"]


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor of a checkpoint."""

    stored: StoredTensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.stored.shape) * item_bytes(self.stored.dtype)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its boxes on disk; more than the whole where reductions are pending."""
        return sum(self.box_bytes(box) for box in self.stored.boxes)

    def box_bytes(self, box: StoredBox) -> int:
        """Bytes of one of its boxes."""
        return box_size(box.box) * item_bytes(self.stored.dtype)

    def to_json(self) -> dict[str, object]:
        """Return the summary as plain values."""
        return {
            "name": self.stored.name,
            "shape": list(self.stored.shape),
            "dtype": self.stored.dtype,
            "spec": None if self.stored.spec is None else str(self.stored.spec),
            "bytes": self.num_bytes,
            "stored_bytes": self.stored_bytes,
            "boxes": [
                {
                    "box": [list(side) for side in box.box],
                    "addend": list(box.addend),
                    "rank": box.rank,
                    "file": box.path.name,
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

    @property
    def num_bytes(self) -> int:
        """Bytes of all whole tensors: about the size of the merged file."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """Bytes of the boxes that each device of the mesh stored."""
        stored: dict[int, int] = {} if self.mesh is None else dict.fromkeys(self.mesh.ids, 0)
        for tensor in self.tensors:
            for box in tensor.stored.boxes:
                stored[box.rank] = stored.get(box.rank, 0) + tensor.box_bytes(box)
        return stored if self.mesh is not None else dict(sorted(stored.items()))

    @property
    def files_by_rank(self) -> dict[int, str]:
        """Name of the file of each device that stored any box."""
        boxes = (box for tensor in self.tensors for box in tensor.stored.boxes)
        return {box.rank: box.path.name for box in boxes}

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
        }


def _mesh_json(mesh: DeviceMesh) -> dict[str, object]:
    return {
        "ids": list(mesh.ids),
        "shape": list(mesh.shape),
        "axis_names": None if mesh.axis_names is None else list(mesh.axis_names),
    }


def inspect_checkpoint(directory: Path | str) -> CheckpointSummary:
    """Return what a checkpoint holds; its headers are read and checked, its data is not.

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
    source = open_checkpoint(directory)
    tensors = tuple(TensorSummary(source.tensor(name)) for name in source.names)
    for tensor in tensors:
        check_tiling(tensor.stored)
    return CheckpointSummary(source.directory, source.format, source.mesh, tensors)
