"""Detects files that are written while they are read."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardspec.checkpoint.storage.path import Identity, StoragePath
from shardspec.errors import CheckpointError


class Snapshot(NamedTuple):
    """The identities of files, taken before a checkpoint is opened.

    `check_unchanged` is called after all reads: of files that were written meanwhile, old and new
    parts may have been read.
    """

    place: StoragePath
    """A file, or a directory."""
    nested: bool
    """Whether files in subdirectories are included."""
    files: Mapping[StoragePath, Identity]

    @classmethod
    def of(cls, place: StoragePath, *, nested: bool = False) -> "Snapshot":
        """Take a snapshot."""
        return cls(place, nested, _identities(place, nested))

    def check_unchanged(self, files: Iterable[StoragePath]) -> None:
        """Raise CheckpointError if a file has changed since the snapshot."""
        now = _identities(self.place, self.nested)
        for path in files:
            if path not in now or now[path] != self.files.get(path):
                done = "changed" if path in now else "was removed"
                raise CheckpointError(
                    f"{path}: {done} while it was read, so what was read may be a mixture of "
                    "two saves; run again when nobody writes it"
                )


def _identities(place: StoragePath, nested: bool) -> dict[StoragePath, Identity]:
    """Return the identities of the files in a directory, or of one file."""
    try:
        entries = {place / name: entry for name, entry in place.list().items()}
    except NotADirectoryError:
        entry = place.look()
        return {} if entry is None else {place: entry.identity}
    except OSError:  # opening the checkpoint reports it
        return {}
    files: dict[StoragePath, Identity] = {}
    for path, entry in entries.items():
        if entry.kind != "directory":
            files[path] = entry.identity
        elif nested:
            files |= _identities(path, nested=True)
    return files
