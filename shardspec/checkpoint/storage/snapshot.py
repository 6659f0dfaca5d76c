"""Whether files were written while they were read."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardspec.checkpoint.storage.path import Identity, StoragePath
from shardspec.errors import CheckpointError


class Snapshot(NamedTuple):
    """The files of a place, and their identities; taken before a checkpoint is opened.

    `check_unchanged` is called once everything has been read: files that were written meanwhile may
    have been read half old and half new.
    """

    place: StoragePath
    """A file, or a directory."""
    nested: bool
    """Whether directories below count."""
    files: Mapping[StoragePath, Identity]

    @classmethod
    def of(cls, place: StoragePath, *, nested: bool = False) -> "Snapshot":
        """Take a snapshot."""
        return cls(place, nested, _identities(place, nested))

    def check_unchanged(self, files: Iterable[StoragePath]) -> None:
        """Check that files are the same as in the snapshot."""
        now = _identities(self.place, self.nested)
        for path in files:
            if path not in now or now[path] != self.files.get(path):
                done = "changed" if path in now else "was removed"
                raise CheckpointError(
                    f"{path}: {done} while it was read, so what was read may be a mixture of "
                    "two saves; run again when nobody writes it"
                )


def _identities(place: StoragePath, nested: bool) -> dict[StoragePath, Identity]:
    """Return the identities of the files in a directory; a file stands for itself."""
    try:
        entries = {place / name: entry for name, entry in place.list().items()}
    except NotADirectoryError:
        entry = place.look()
        return {} if entry is None else {place: entry.identity}
    except OSError:  # the reader of the checkpoint reports it
        return {}
    files: dict[StoragePath, Identity] = {}
    for path, entry in entries.items():
        if entry.kind != "directory":
            files[path] = entry.identity
        elif nested:
            files |= _identities(path, nested=True)
    return files
