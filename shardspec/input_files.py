"""Opens regular files without blocking, and reads small ones, such as rules and maps."""

import json
import os
import stat
from pathlib import PurePath
from typing import Final

from shardspec.errors import InputFileError, ShardSpecError

_MAX_JSON_BYTES: Final = 64 << 20


def open_regular(path: PurePath, error: type[ShardSpecError]) -> int:
    """Return a descriptor for reading a regular file; raises `error` for anything else."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer. A device might never end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as refused:
        why = refused.strerror if isinstance(refused, OSError) else str(refused)
        raise error(f"{path}: cannot be read: {why}; check the path") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path}: is not a regular file; name one")
    return descriptor


def read_input_file(path: PurePath, most_bytes: int) -> bytes:
    """Return the content of a regular file; raises `InputFileError` for others and large ones."""
    with open(open_regular(path, InputFileError), "rb") as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as error:
            raise InputFileError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > most_bytes:
        raise InputFileError(f"{path}: has more than {most_bytes:,} bytes")
    return data


def read_json_object(path: PurePath) -> dict[str, object]:
    """Return the object that a JSON file has, as a model's config; else raises `InputFileError`."""
    try:
        value = json.loads(read_input_file(path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise InputFileError(f"{path}: holds no JSON object")
    return value
