"""Opens regular files without blocking, and reads small input files, such as rules and maps."""

import json
import os
import stat
from pathlib import PurePath
from typing import Final

from shardspec.errors import InputFileError, ShardSpecError

_MAX_JSON_BYTES: Final = 64 << 20


def open_regular(path: PurePath, error: type[ShardSpecError]) -> int:
    """Return a descriptor for reading a regular file; raises `error` for other kinds."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer. A device might never end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as refused:
        reason = refused.strerror if isinstance(refused, OSError) else str(refused)
        raise error(f"{path}: cannot be read: {reason}; check the path") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path}: is not a regular file")
    return descriptor


def read_input_file(path: PurePath, max_bytes: int) -> bytes:
    """Return the bytes of a regular file; raises `InputFileError` if it has over `max_bytes`."""
    with open(open_regular(path, InputFileError), "rb") as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise InputFileError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise InputFileError(f"{path}: has more than {max_bytes:,} bytes")
    return data


def read_json_object(path: PurePath) -> dict[str, object]:
    """Return the JSON object in a file, such as a model's config; raises `InputFileError`."""
    try:
        value = json.loads(read_input_file(path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise InputFileError(f"{path}: is not a JSON object, such as a model's config")
    return value
