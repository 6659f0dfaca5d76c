"""Writing files into an object store: each appears when it is complete, old ones stay until then.

A store takes a large file in parts and makes them a file in one indivisible step. fsspec does that
at the end of a transaction, or drops the parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from shardspec.checkpoint.commit import exists
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import RemotePath, store_errors
from shardspec.errors import CheckpointError

__all__ = ["BESIDE_SUFFIX", "RemoteStaging", "Upload"]

_PART_BYTES: Final = 8 << 20
_MOST_PARTS: Final = 9_000
"""S3 takes 10,000 parts; a file of more than 72 GB comes in larger ones."""


class Upload:
    """A new file in a store, written in a `with` block, from its start to its end.

    Parameters
    ----------
    path
        Its name.
    num_bytes
        Its size.
    overwrite
        Whether a file of that name is replaced.

    Raises
    ------
    OutputExistsError
        At the end of the block, if there is such a file and `overwrite` is not set.
    CheckpointError
        If the store refuses. Nothing has the name then, or what had it before.
    """

    def __init__(self, path: RemotePath, num_bytes: int, *, overwrite: bool) -> None:
        self._path = path
        self._store = path.store
        self._mode = "wb" if overwrite else "xb"
        self._part = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))
        self._part += -self._part % (1 << 20)
        self.written = 0
        """Bytes that were written so far."""

    def __enter__(self) -> Self:
        from fsspec.transaction import Transaction

        # One of its own: stores that threads share have one for all files.
        self._transaction = Transaction(self._store)
        if not self._store.async_impl:
            # Some of these look for a transaction only.
            self._transaction.start()
        try:
            self._file = self._told(self._open)
        except BaseException:
            self._transaction.complete(commit=False)
            raise
        self._transaction.files.append(self._file)
        return self

    def _open(self) -> Any:  # noqa: ANN401  # fsspec is not typed
        return self._store.open(
            str(self._path), self._mode, block_size=self._part, autocommit=False
        )

    def write(self, data: bytes | memoryview) -> None:
        """Write on."""
        self._told(lambda: self._file.write(data))
        self.written += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        def end() -> None:
            try:
                # Sends what is left; in a transaction the file is not there yet.
                self._file.close()
            except BaseException:
                self._transaction.complete(commit=False)
                raise
            self._transaction.complete(commit=error is None)
            self._store.invalidate_cache(str(self._path.parent))

        self._told(end)

    def _told(self, act: Callable[[], Any]) -> Any:  # noqa: ANN401  # what fsspec gives
        """Do something; make one line of what the store raises."""
        with store_errors(self._path, "written"):
            try:
                return act()
            except FileExistsError:
                raise exists(self._path) from None


BESIDE_SUFFIX: Final = ".shardspec-tmp"
"""How names end that were not moved yet; a killed run leaves them."""


def _is_list(name: str) -> bool:
    """Return whether a file says what the others are: without it, none counts."""
    return name.endswith((".json", ".metadata"))


@dataclass(frozen=True, slots=True)
class RemoteStaging:
    """Where the files of an output go in a store, until all of them have been read again.

    A file of a new name is uploaded under it. One whose name is taken is uploaded beside the old
    one, and then copied over it by the store itself, in one step.
    """

    path: RemotePath
    directory: bool
    there: frozenset[str]
    """Names of all files that are there."""
    old: frozenset[str]
    """Names of those that go; what has the name of a new file is replaced too."""
    overwrite: bool
    token: str
    """A word of this run, for names that nobody else has."""
    made: list[RemotePath] = field(default_factory=list)
    """What is there so far; removed on failure."""

    @classmethod
    def begun(
        cls,
        path: RemotePath,
        token: str,
        *,
        directory: bool,
        overwrite: bool,
        replaced: frozenset[str],
    ) -> "RemoteStaging":
        """Ask the store what is there."""
        there: set[str] = set()
        if overwrite and directory:
            with suppress(FileNotFoundError):
                there = set(path.entries())
        elif overwrite and path.is_file():
            there = {path.name}
        left = {name for name in there if name.endswith(BESIDE_SUFFIX)}
        old = frozenset(replaced & there | left)
        return cls(path, directory, frozenset(there), old, overwrite, token)

    def final(self, name: str) -> RemotePath:
        """Return the final name of a file."""
        return self.path / name if self.directory else self.path

    def place(self, name: str, *, beside: bool = False) -> RemotePath:
        """Return the name to upload a file under; `beside` keeps it from counting at once."""
        final = self.final(name)
        if not beside and name not in self.there:
            return final
        return final.with_name(f".{final.name}.{self.token}{BESIDE_SUFFIX}")

    def publish(self, files: Sequence[str], last: Mapping[str, bytes]) -> None:
        """Move what lies beside to where it belongs, and remove what is left of the old.

        Parameters
        ----------
        files
            All files but those that say what the others are; they were uploaded.
        last
            Those, by name; they are uploaded now.
        """
        moved = [name for name in files if name in self.there]
        for name, data in last.items():
            place = self.place(name, beside=bool(moved))
            with Upload(place, len(data), overwrite=self.overwrite) as upload:
                upload.write(data)
            self.made.append(place)
            with SourceFile(place) as file:
                if file.num_bytes != len(data) or file.read(0, len(data)) != data:
                    raise CheckpointError(f"{place}: was read back differently; nothing was kept")
        if self.directory and moved:
            # Old and new ones side by side could be taken for one checkpoint.
            self._remove(
                name
                for name in self.there
                if name in {*files, *last} or (name in self.old and _is_list(name))
            )
            self.made.extend(map(self.final, moved))
        for name in moved:
            self.place(name).replace(self.final(name))
        for name in last:
            if moved or name in self.there:
                self.place(name, beside=True).replace(self.final(name))
        if self.directory:
            self._remove(self.old - {*files, *last})

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, first those that say what the others are."""
        for name in sorted(names, key=lambda name: (not _is_list(name), name)):
            self.final(name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was uploaded, as far as the store lets us: an error is on its way already."""
        for file in self.made:
            with suppress(CheckpointError):
                file.unlink(missing_ok=True)
