"""One plain safetensors file as a checkpoint: every tensor is one box, held by rank 0."""

from collections.abc import Mapping
from pathlib import Path

from shardspec.checkpoint.formats.hf_index import whole_header
from shardspec.checkpoint.reading.form_names import SAFETENSORS
from shardspec.checkpoint.reading.info import SAVE_KEY
from shardspec.checkpoint.reading.source import AllKnown, StoredBox, StoredTensor
from shardspec.errors import CheckpointError
from shardspec.mesh import DeviceMesh

__all__ = ["SingleFile"]


class SingleFile(AllKnown):
    """A `CheckpointSource` over one safetensors file.

    Raises
    ------
    CheckpointError
        If it cannot be read, breaks a rule of its format, or is a part of a checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header = whole_header(path)
        if SAVE_KEY in header.metadata:
            raise CheckpointError(
                f"{path}: holds what one rank has saved, which may be parts of tensors; name its "
                f"directory, {path.parent}"
            )
        self._entries = {entry.name: entry for entry in header.entries}

    @property
    def format(self) -> str:
        """What wrote it."""
        return SAFETENSORS

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

    @property
    def others(self) -> Mapping[str, object]:
        """Nothing: the format holds tensors only."""
        return {}

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor as one box."""
        entry = self._entries[name]
        whole = tuple((0, size) for size in entry.shape)
        boxes = () if 0 in entry.shape else (StoredBox(whole, (), 0, self._path, entry.offset),)
        return StoredTensor(name, entry.shape, entry.dtype, None, (), boxes)
