"""Where bytes go that are put together from stored boxes: memory, or a file."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from shardspec.checkpoint.behind import Behind
from shardspec.checkpoint.digests import crc32, crc32_combine
from shardspec.checkpoint.files import SourceFile, reason
from shardspec.checkpoint.pieces import Block, Run
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = ["FileSink", "MemorySink", "Sink"]

_COPY_BYTES: Final = 4 << 20
"""Bytes copied by one call inside the system, so that progress is seen."""
_NO_DIRECT_COPY: Final = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
)
"""Answers of a system or file system that cannot copy between these two files by itself."""


class Sink(Protocol):
    """Where the bytes of a target go."""

    @property
    def direct(self) -> bool:
        """Whether runs may be copied without being seen."""
        ...

    def copy(self, run: Run, file: SourceFile) -> None:
        """Copy a run from an open file to its place."""
        ...

    def room(self, block: Block) -> memoryview:
        """Return flat memory in which a block can be put together."""
        ...

    def put(self, block: Block, room: memoryview, crc: int | None = None) -> None:
        """Take a block that was put together in what `room` gave; and its CRC-32, if known."""
        ...


class MemorySink:
    """Puts a target into memory.

    Parameters
    ----------
    out
        Flat memory as long as the target.
    """

    def __init__(self, out: memoryview) -> None:
        self._out = out

    @property
    def direct(self) -> bool:
        """True: nothing is done with the bytes."""
        return True

    def copy(self, run: Run, file: SourceFile) -> None:
        """Read a run straight to its place."""
        place = self._out[run.target_offset : run.target_offset + run.num_bytes]
        file.read_into(place, run.source_offset)

    def room(self, block: Block) -> memoryview:
        """Return the very place of the block."""
        return self._out[block.target_offset : block.target_offset + block.num_bytes]

    def put(self, block: Block, room: memoryview, crc: int | None = None) -> None:
        """Do nothing: the block is in its place."""


class FileSink:
    """Writes a target into a file.

    Parameters
    ----------
    fd, path
        The file, open for writing; the path is for errors.
    name, offset
        What the target is, for errors, and where in the file it starts.
    behind
        Writes blocks of that file.
    advance
        Called with the number of bytes of each block.
    digested
        Whether to take the CRC-32 of what is written.
    checked
        Whether to have what was written read again; then it is `digested` too.
    dtypes
        Source and target dtype if the numbers are to be cast.
    """

    def __init__(
        self,
        fd: int,
        path: Path,
        name: str,
        offset: int,
        behind: Behind,
        advance: Callable[[int], None],
        *,
        digested: bool = False,
        checked: bool = False,
        dtypes: tuple[str, str] | None = None,
    ) -> None:
        assert digested or not checked, "what is checked has a digest"
        self._fd = fd
        self._path = path
        self._name = name
        self._offset = offset
        self._behind = behind
        self._advance = advance
        self._digested = digested
        self._checked = checked
        self._dtypes = dtypes
        self.crc32 = 0
        """Of what was put so far, if it is digested; the target is filled from its start."""

    @property
    def direct(self) -> bool:
        """Whether the system may copy by itself, as nothing has to be seen or changed."""
        return not self._digested and self._dtypes is None

    def copy(self, run: Run, file: SourceFile) -> None:
        """Copy a run inside the system, or through memory where it cannot do that."""
        source = file.descriptor
        done = 0
        if source is not None and sys.platform == "linux":
            done = self._copy_direct(run, source)
        while done < run.num_bytes:
            part = self._behind.room(min(self._behind.block_bytes, run.num_bytes - done))
            file.read_into(part, run.source_offset + done)
            target = self._offset + run.target_offset + done
            self._behind.put(part, target, self._name, None)
            done += len(part)
            self._advance(len(part))

    def _copy_direct(self, run: Run, fd: int) -> int:
        """Return how many bytes the system has copied."""
        done = 0
        while done < run.num_bytes:
            try:
                count = os.copy_file_range(
                    fd,
                    self._fd,
                    min(_COPY_BYTES, run.num_bytes - done),
                    run.source_offset + done,
                    self._offset + run.target_offset + done,
                )
            except OSError as error:
                if error.errno in _NO_DIRECT_COPY:
                    return done
                raise CheckpointError(
                    f"{self._path}: copying from {run.source.path} failed: {reason(error)}"
                ) from None
            if count == 0:
                # Either the file was cut short, which reading will tell, or the file system lies.
                return done
            done += count
            self._advance(count)
        return done

    def room(self, block: Block) -> memoryview:
        """Return the start of a buffer."""
        return self._behind.room(block.num_bytes)

    def put(self, block: Block, room: memoryview, crc: int | None = None) -> None:
        """Have the block written."""
        target = block.target_offset
        if self._dtypes is not None:
            source, wanted = self._dtypes
            from shardspec.checkpoint.numbers import cast

            room, crc = cast(room, source, wanted), None
            target = target // item_bytes(source) * item_bytes(wanted)
        if self._digested:
            crc = crc32(room) if crc is None else crc
            self.crc32 = int(crc32_combine(self.crc32, crc, len(room)))
        self._behind.put(room, self._offset + target, self._name, crc if self._checked else None)
        self._advance(len(room))
