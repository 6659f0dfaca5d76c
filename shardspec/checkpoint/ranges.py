"""Reading a file in an object store by ranges of bytes, a little ahead of what is asked for.

A request to a store takes as long as some megabytes on the way. So a reader that goes on near where
it stopped gets twice as much as the time before, up to a limit; one that jumps gets what it wants.
"""

from typing import Final

from shardspec.checkpoint.remote import RemotePath, StoreErrors
from shardspec.errors import CheckpointError

__all__ = ["MOST_AHEAD", "RangeReader"]

_LEAST: Final = 64 << 10
"""Least bytes of a request: headers and what lies around them come in one."""
MOST_AHEAD: Final = 4 << 20
"""Most bytes of a request."""


class RangeReader:
    """A file in a store; keeps the last range that it has read.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    CheckpointError
        If it is missing, or the store refuses.
    """

    __slots__ = (
        "_block",
        "_expected",
        "_most",
        "_path",
        "_start",
        "_store",
        "_window",
        "num_bytes",
    )

    def __init__(self, path: RemotePath) -> None:
        self.num_bytes = path.num_bytes()
        self._path = path
        self._store = path.store
        self._start = 0
        self._block = b""
        self._window = _LEAST
        self._expected = (0, 0)
        self._most = MOST_AHEAD

    def keep(self, num_bytes: int) -> None:
        """Keep at most so many bytes from now on; not below what headers need."""
        self._most = max(_LEAST, min(num_bytes, MOST_AHEAD))
        if len(self._block) > self._most:
            self._start += len(self._block)
            self._block = b""

    def expect(self, start: int, end: int) -> None:
        """Take note that all bytes of a stretch will be wanted."""
        self._expected = start, end

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from a place in the file.

        Raises
        ------
        CheckpointError
            If the file ends before, or the store refuses.
        """
        done = 0
        while done < len(buffer):
            inside = offset + done - self._start
            if not 0 <= inside < len(self._block):
                self._fetch(offset + done, len(buffer) - done, offset + len(buffer))
                inside = 0
            part = memoryview(self._block)[inside : inside + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def _fetch(self, start: int, num_bytes: int, needed: int) -> None:
        """Read a range from `start` on, of so many bytes if the limit allows, and keep it."""
        # Rows of columns are read along with what lies between them, where that is little.
        goes_on = 0 <= start - self._start - len(self._block) < _LEAST
        self._window = min(self._window * 2, self._most) if goes_on else _LEAST
        first, last = self._expected
        rest = last - start if first <= start else 0
        end = min(start + min(max(num_bytes, rest, self._window), self._most), self.num_bytes)
        # Let go of first: two of them would be twice the memory.
        self._block = b""
        data = b""
        if start < end:
            with StoreErrors(self._path, "read"):
                data = self._store.cat_file(str(self._path), start=start, end=end)
        if len(data) != max(end - start, 1):
            raise CheckpointError(
                f"{self._path}: ends at byte {start + len(data)}, but bytes up to {needed} are "
                "needed; it was cut short while being read"
            )
        self._start, self._block = start, data
