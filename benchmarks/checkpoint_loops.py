"""The bare loop of copying and checking: what is the least that two cores need for it.

python -m benchmarks.checkpoint_loops OUT FILE...

Two processes copy half of the files each, a block at a time, into a file of a folder, and take the
CRC-32 of what they read. No plan, no rows, no source's digest.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from isal.isal_zlib import crc32

from shardspec.checkpoint.storage.checksums import BLOCK_BYTES

__all__ = ["main"]

_PROCESSES: Final = 2


def copy(files: Sequence[Path], place: Path) -> int:
    """Copy files into one; return the CRC-32 of what was read."""
    room = memoryview(bytearray(BLOCK_BYTES))
    value = at = 0
    out = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.ftruncate(out, sum(path.stat().st_size for path in files))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(room):
                part = room[:count]
                os.pwrite(out, part, at)
                value = crc32(part, value)
                at += count
    os.close(out)
    return int(value)


def main(words: Sequence[str]) -> None:
    """Copy, and print how long it took."""
    out, *files = map(Path, words)
    started = time.perf_counter()
    out.mkdir()
    children = []
    for number in range(_PROCESSES):
        child = os.fork()
        if not child:
            copy(files[number::_PROCESSES], out / str(number))
            os._exit(0)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    if any(ends):
        sys.exit(1)
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main(sys.argv[1:])
