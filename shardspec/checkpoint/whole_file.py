"""One plain safetensors file as a checkpoint: every tensor is one box, held by rank 0."""

from pathlib import Path

from shardspec.checkpoint.files import open_regular
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.safetensors_file import read_header
from shardspec.checkpoint.source import CheckpointSource, StoredBox, StoredTensor
from shardspec.mesh import DeviceMesh

__all__ = ["WholeFile", "open_either"]


class WholeFile:
    """A `CheckpointSource` over one safetensors file.

    Raises
    ------
    CheckpointError
        If it cannot be read or breaks a rule of its format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(open_regular(path), "rb", buffering=0) as file:
            header = read_header(file.fileno(), path)
        self._entries = {entry.name: entry for entry in header.entries}

    @property
    def directory(self) -> Path:
        """The file itself."""
        return self._path

    @property
    def mesh(self) -> DeviceMesh | None:
        """None: the format does not say who wrote it."""
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor, sorted."""
        return tuple(sorted(self._entries))

    @property
    def files(self) -> tuple[Path, ...]:
        """The file itself."""
        return (self._path,)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor as one box."""
        entry = self._entries[name]
        whole = tuple((0, size) for size in entry.shape)
        boxes = () if 0 in entry.shape else (StoredBox(whole, (), 0, self._path, entry.offset),)
        return StoredTensor(name, entry.shape, entry.dtype, None, (), boxes)


def open_either(path: Path | str) -> CheckpointSource:
    """Open a plain safetensors file or the checkpoint in a directory.

    Raises
    ------
    CheckpointError
        As `open_checkpoint` and `WholeFile`.
    """
    place = Path(path)
    return WholeFile(place) if place.is_file() else open_checkpoint(place)
