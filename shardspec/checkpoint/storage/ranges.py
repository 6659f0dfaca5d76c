"""Reading a file in an object store by ranges of bytes, a little ahead of what is asked for.

A request to a store takes as long as some megabytes on the way. So a reader that goes on near where
it stopped gets twice as much as the time before, up to a limit; one that jumps gets what it wants.
What will be wanted next is on its way while what has come is worked on.
"""

from collections import deque
from typing import Final

from shardspec.checkpoint.storage.planned import (
    MOST_OF_ONE,
    FileStretch,
    Planned,
    Request,
    read_range,
    request,
)
from shardspec.checkpoint.storage.remote import RemotePath
from shardspec.errors import CheckpointError

__all__ = ["RangeReader"]

_LEAST: Final = 64 << 10
"""Least bytes of a request: headers and what lies around them come in one."""
_ON_THE_WAY: Final = 3
"""Most requests that are under way while bytes are worked on: one alone does not fill the line."""
_CERTAIN: Final = 1 << 20
"""Bytes of a request from which on a reader is taken for one that goes on to the end."""


class RangeReader:
    """A file in a store; keeps the last range that it has read, and asks for the next ones.

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
        "_ahead",
        "_block",
        "_expected",
        "_most",
        "_path",
        "_planned",
        "_planned_block",
        "_start",
        "_store",
        "_window",
        "num_bytes",
    )

    def __init__(self, path: RemotePath) -> None:
        self.num_bytes = path.num_bytes()
        self._path = path
        # Other threads would get one of their own from fsspec, with other connections.
        self._store = path.store
        self._planned: Planned | None = None
        self._start = 0
        self._block = b""
        self._planned_block = False
        """Whether what is kept was planned: then it stays until all of it was read, and no longer,
        as many files have their turn."""
        self._window = _LEAST
        self._expected = (0, 0)
        self._most = MOST_OF_ONE
        self._ahead: deque[Request] = deque()

    def keep(self, num_bytes: int) -> None:
        """Keep at most so many bytes from now on; not below what headers need."""
        self._most = max(_LEAST, min(num_bytes // (1 + _ON_THE_WAY), MOST_OF_ONE))
        if len(self._block) > self._most and not self._planned_block:
            self._let_go()
            self._ahead.clear()

    def _let_go(self) -> None:
        self._start += len(self._block)
        self._block = b""

    def holds(self, start: int, end: int) -> bool:
        """Return whether bytes are there without another request."""
        return self._start <= start and end <= self._start + len(self._block)

    def plan(self, planned: Planned) -> None:
        """Take what is planned from there when it is its turn."""
        self._planned = planned

    def expect(self, start: int, end: int) -> None:
        """Take note that all bytes of a stretch will be wanted."""
        self._expected = start, end

    def read_into(self, buffer: memoryview, offset: int, end: int = 0) -> None:
        """Fill a buffer of bytes from a place in the file.

        Parameters
        ----------
        buffer, offset
            The buffer, and the place.
        end
            Where that ends of which this is a part, if the rest will be read next.

        Raises
        ------
        CheckpointError
            If the file ends before, or the store refuses.
        """
        end = max(end, offset + len(buffer))
        done = 0
        while done < len(buffer):
            inside = offset + done - self._start
            if not 0 <= inside < len(self._block):
                self._fetch(offset + done, end - offset - done, end)
                inside = offset + done - self._start
            part = memoryview(self._block)[inside : inside + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            if self._planned_block and inside + len(part) == len(self._block):
                self._let_go()

    def _fetch(self, start: int, num_bytes: int, needed: int) -> None:
        """Read a range from `start` on, of so many bytes if the limit allows, and keep it."""
        limit = self.num_bytes
        if self._planned is not None:
            if self._take_planned(self._planned, start):
                return
            # What is planned comes by itself.
            limit = self._planned.next_start(self._path, start) or limit
        # Rows of columns are read along with what lies between them, where that is little.
        stopped = self._start + len(self._block)
        goes_on = 0 <= start - stopped < _LEAST
        self._window = min(self._window * 2, self._most) if goes_on else _LEAST
        # Let go of first: two of them would be twice the memory.
        self._block = b""
        while self._ahead and not (
            self._ahead[0].stretch.start <= start < self._ahead[0].stretch.end
        ):
            self._ahead.popleft()
        if self._ahead:
            ahead = self._ahead.popleft()
            data = ahead.data.answer()
            start, end = ahead.stretch.start, ahead.stretch.end
        else:
            first, last = self._expected
            rest = last - start if first <= start else 0
            end = min(start + min(max(num_bytes, rest, self._window), self._most), limit)
            data = read_range(self._store, FileStretch(self._path, start, end - start))
        if len(data) != max(end - start, 1):
            raise CheckpointError(
                f"{self._path}: ends at byte {start + len(data)}, but bytes up to {needed} are "
                "needed; it was cut short while being read"
            )
        self._start, self._block, self._planned_block = start, data, False
        self._ask_ahead(goes_on, limit)

    def _take_planned(self, planned: Planned, start: int) -> bool:
        """Keep what the plan has for a place on; return False if there is nothing."""
        found = planned.take(self._path, start)
        if found is None:
            return False
        self._block = b""
        data = found.data.answer()
        if len(data) < found.stretch.num_bytes:
            # The file ends before; which of those who read of it has to know that, is seen next.
            return False
        self._start, self._block, self._planned_block = found.stretch.start, data, True
        return True

    def _ask_ahead(self, goes_on: bool, limit: int) -> None:
        """Ask for the next ranges where it is all but certain that they will be wanted."""
        first, last = self._expected
        if not (first <= self._start and self._start + len(self._block) <= last):
            certain = goes_on and self._window >= min(_CERTAIN, self._most)
            last = self.num_bytes if certain else 0
        last = min(last, limit)
        while len(self._ahead) < _ON_THE_WAY:
            start = self._ahead[-1].stretch.end if self._ahead else self._start + len(self._block)
            end = min(start + self._most, last)
            if start >= end:
                break
            stretch = FileStretch(self._path, start, end - start)
            self._ahead.append(request(self._store, stretch))
