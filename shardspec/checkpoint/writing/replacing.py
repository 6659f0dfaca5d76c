"""Where the files of an output go in a store, until they are checked: old ones stay until then.

A file of a new name is uploaded under it. One whose name is taken is uploaded beside the old one,
read again, and then copied over it by the store itself, in one step.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from shardspec.checkpoint.store import RemotePath
from shardspec.errors import CheckpointError

__all__ = ["BESIDE_SUFFIX", "Places"]

BESIDE_SUFFIX: Final = ".shardspec-tmp"
"""How names end that were not moved yet; a killed run leaves them."""
_LISTS: Final = (".json", ".metadata")
"""How the names of files end that say what the others are: without them, none counts."""


class Places(NamedTuple):
    """Where the files of an output go."""

    path: RemotePath
    directory: bool
    there: frozenset[str]
    """Names of all files that are there."""
    old: frozenset[str]
    """Names of those that go; what has the name of a new file is replaced too."""
    token: str
    """A word of this run, for names that nobody else has."""

    @classmethod
    def found(
        cls,
        path: RemotePath,
        token: str,
        *,
        directory: bool,
        overwrite: bool,
        replaced: frozenset[str] = frozenset(),
    ) -> "Places":
        """Return the places for an output, once the store was asked what is there.

        Raises
        ------
        CheckpointError
            If the store refuses.
        """
        there: set[str] = set()
        if overwrite and directory:
            with suppress(FileNotFoundError):
                there = set(path.entries())
        elif overwrite and path.is_file():
            there = {path.name}
        left = {name for name in there if name.endswith(BESIDE_SUFFIX)}
        old = frozenset(replaced & there | left)
        return cls(path, directory, frozenset(there), old, token)

    def final(self, name: str) -> RemotePath:
        """Return the final name of a file."""
        return self.path / name if self.directory else self.path

    def place(self, name: str, *, beside: bool = False) -> RemotePath:
        """Return the name to upload a file under; `beside` keeps it from counting at once."""
        final = self.final(name)
        if not beside and name not in self.there:
            return final
        return final.with_name(f".{final.name}.{self.token}{BESIDE_SUFFIX}")

    def publish(self, files: Sequence[str], last: Sequence[str], made: list[RemotePath]) -> None:
        """Move what lies beside to where it belongs, and remove what is left of the old.

        Parameters
        ----------
        files
            All files but those that say what the others are.
        last
            Those; they were uploaded beside if any of `files` was.
        made
            Gets the names of files that are no longer the old ones.

        Raises
        ------
        CheckpointError
            If the store refuses.
        """
        moved = [name for name in files if name in self.there]
        if self.directory and moved:
            # Old and new ones side by side could be taken for one checkpoint.
            self._remove(
                name
                for name in self.there
                if name in {*files, *last} or (name in self.old and name.endswith(_LISTS))
            )
            made += map(self.final, moved)
        for name in moved:
            self.place(name).replace(self.final(name))
        for name in last:
            if moved or name in self.there:
                self.place(name, beside=True).replace(self.final(name))
        if self.directory:
            self._remove(self.old - {*files, *last})

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, first those that say what the others are."""
        for name in sorted(names, key=lambda name: (not name.endswith(_LISTS), name)):
            self.final(name).unlink(missing_ok=True)

    def discard(self, made: Sequence[RemotePath]) -> None:
        """Remove what was uploaded, as far as the store lets us: an error is on its way already."""
        for file in made:
            with suppress(CheckpointError):
                file.unlink(missing_ok=True)
