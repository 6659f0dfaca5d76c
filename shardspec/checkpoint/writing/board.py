"""Where processes leave messages for each other: a directory, or a place in an object store."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from shardspec.checkpoint.store import RemotePath, store_errors
from shardspec.errors import CheckpointError

__all__ = ["Board", "DirectoryBoard", "StoreBoard"]


class Board(Protocol):
    """Named messages that several processes see."""

    @property
    def longest_pause_s(self) -> float:
        """How long to wait at most before looking again."""
        ...

    def put(self, name: str, text: str) -> None:
        """Leave a message; others see all of it or nothing."""
        ...

    def get(self, name: str) -> str | None:
        """Return a message, if there is one of that name."""
        ...

    def names(self) -> set[str]:
        """Return the names of all messages."""
        ...


class DirectoryBoard:
    """Messages are files of a directory.

    Parameters
    ----------
    place
        The directory; one that is missing holds no messages, and takes none.
    """

    longest_pause_s = 0.02

    def __init__(self, place: Path) -> None:
        self._place = place

    def put(self, name: str, text: str) -> None:
        """Write a file under another name, and rename it."""
        temporary = self._place / f"{name}.tmp"
        temporary.write_text(text, "utf-8")
        temporary.rename(self._place / name)

    def get(self, name: str) -> str | None:
        """Read a file."""
        with suppress(FileNotFoundError):
            return (self._place / name).read_text("utf-8")
        return None

    def names(self) -> set[str]:
        """List the directory."""
        with suppress(FileNotFoundError):
            return {name for name in os.listdir(self._place) if not name.endswith(".tmp")}
        return set()


class StoreBoard:
    """Messages are small files of an object store.

    Parameters
    ----------
    place
        What their names start with.

    Raises
    ------
    CheckpointError
        If other processes do not see it.
    """

    longest_pause_s = 1.0

    def __init__(self, place: RemotePath) -> None:
        if place.parts[0] == "memory:":
            raise CheckpointError(
                f"{place.parent}: memory:// is the memory of one process, and others do not see "
                "it; start one process"
            )
        self._place = place

    def put(self, name: str, text: str) -> None:
        """Write a file."""
        with store_errors(self._place, "written"):
            self._place.store.pipe_file(str(self._place / name), text.encode())

    def get(self, name: str) -> str | None:
        """Read a file."""
        with store_errors(self._place, "read"), suppress(FileNotFoundError):
            return str(self._place.store.cat_file(str(self._place / name)), "utf-8")
        return None

    def names(self) -> set[str]:
        """Ask the store for all that start so."""
        store = self._place.store
        store.invalidate_cache(str(self._place))
        with store_errors(self._place, "read"), suppress(FileNotFoundError):
            found = store.ls(str(self._place), detail=True)
            return {str(entry["name"]).rpartition("/")[2] for entry in found}
        return set()

    def clear(self, names: set[str]) -> None:
        """Remove messages."""
        for name in sorted(names):
            (self._place / name).unlink(missing_ok=True)
