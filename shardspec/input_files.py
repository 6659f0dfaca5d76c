"""Files of arguments: rules, maps, lists of pairs. Read whole, within a bound."""

import os
import stat
from pathlib import Path

from shardspec.errors import InputFileError

__all__ = ["read_input_file"]


def read_input_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of a small regular file.

    Raises
    ------
    InputFileError
        If it cannot be read, has more bytes than `most_bytes`, or is no regular file: a pipe would
        make the reader wait, and a device might never end.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InputFileError(f"{path}: is not a regular file")
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InputFileError):
            raise
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputFileError(f"{path}: cannot be read: {why}") from None
    if len(data) > most_bytes:
        raise InputFileError(f"{path}: has more than {most_bytes:,} bytes")
    return data
