"""The lines of a zip's directory, and directories that were made alike.

What ranks saved differs in the name of the archive and in the digests of records; names, sizes and
places of records are mostly the same. The first directory of a kind is read line by line; of others
that have the same bytes everywhere else, only the digests are taken.
"""

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Final, NamedTuple

__all__ = ["ENTRY", "ENTRY_BYTES", "AlikeLines", "Directory", "TorchLines"]

ENTRY: Final = struct.Struct("<4s4x2H4x3L4H6xL")
"""A line without versions, times and attributes, which say nothing here."""
ENTRY_BYTES: Final = ENTRY.size
_CRC_AT: Final = 16
_CRC_BYTES: Final = 4
_MOST_KEPT: Final = 32
"""Kinds: ranks of one, two and more digits make names and pickles of several lengths."""


class TorchLines(NamedTuple):
    """The lines of a directory but for what differs in files that were made alike.

    They are kept as columns, in the order of the records: a file may have many, and there may be
    many files.
    """

    places: Mapping[str, int]
    """Name without the archive's to its place in the columns."""
    headers: "array[int]"
    """Positions of their own headers in the file."""
    sizes: "array[int]"
    end: int
    """Where the last record ends at the latest."""


class Directory(NamedTuple):
    """What a directory says."""

    archive: bytes
    """What all names start with."""
    lines: TorchLines
    crcs: "array[int]"
    """CRC-32 of every record, in the order of the columns."""


class _Kind(NamedTuple):
    """A directory that was read line by line."""

    archive: bytes
    lines: TorchLines
    fields: struct.Struct
    """What lies between the digests, and them, in turns."""
    between: tuple[bytes, ...]

    def find(self, data: bytes, count: int) -> Directory | None:
        """Return what a directory of the same length says; None if it is not like this one."""
        archive = data[ENTRY_BYTES : ENTRY_BYTES + len(self.archive)]
        if b"/" in archive:
            return None
        folder, own = archive + b"/", self.archive + b"/"
        # The first line has the size of the pickle, which differs most often.
        first = _CRC_AT + _CRC_BYTES
        if data[first : first + len(self.between[1])].replace(folder, own) != self.between[1]:
            return None
        if data.count(folder) != count:
            return None
        fields = self.fields.unpack(data.replace(folder, own))
        if fields[0::2] != self.between:
            return None
        return Directory(archive, self.lines, array("I", fields[1::2]))


class AlikeLines:
    """Directories of zips that start their files, those that differ in digests read once.

    For any number of threads.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._kinds: dict[tuple[int, int, int], list[_Kind]] = {}
        self._left = _MOST_KEPT

    def read(
        self, data: bytes, count: int, end: int, read: Callable[[], tuple[Directory, Sequence[int]]]
    ) -> Directory:
        """Return what a directory says.

        Parameters
        ----------
        data, count
            The directory, and how many lines it has.
        end
            Where it starts in the file.
        read
            Reads it line by line; returns what it says, and where each of its lines starts, in the
            order of the records.
        """
        with self._lock:
            found = self._find(data, count, end)
            if found is None:
                found, starts = read()
                self._keep(data, starts, found)
        return found

    def _find(self, data: bytes, count: int, end: int) -> Directory | None:
        """Return what a directory says; None if none before was like it."""
        kinds = self._kinds.get((len(data), count, end), [])
        for place, kind in enumerate(kinds):
            found = kind.find(data, count)
            if found is not None:
                # The next file is most like this one.
                kinds.insert(0, kinds.pop(place))
                return found
        return None

    def _keep(self, data: bytes, starts: Sequence[int], directory: Directory) -> None:
        """Take note of a directory that was read line by line."""
        # Nothing may be replaced but names: no digest, and nothing within one.
        folder = directory.archive + b"/"
        named = len(folder) > _CRC_BYTES and data.count(folder) == len(starts)
        if not self._left or not named:
            return
        crcs = [start + _CRC_AT for start in starts]
        gaps = [b - a - _CRC_BYTES for a, b in pairwise((-_CRC_BYTES, *crcs, len(data)))]
        if min(gaps) < 0:
            # The lines are not in the order of the records.
            return
        fields = struct.Struct("<" + "L".join(f"{gap}s" for gap in gaps))
        archive, lines, _ = directory
        kind = _Kind(archive, lines, fields, fields.unpack(data)[0::2])
        self._kinds.setdefault((len(data), len(starts), lines.end), []).append(kind)
        self._left -= 1
