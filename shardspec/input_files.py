"""Opens regular files without blocking, and reads small input files, such as rules and maps."""

import json
import os
import re
import stat
import tomllib
from pathlib import PurePath
from typing import Any, Final

from shardspec.errors import InputFileError, ShardSpecError

MAX_TOML_BYTES: Final = 1 << 20
MAX_JSON_BYTES: Final = 4 << 20
"""Maximum size of a config; its values may take fifty times as much memory."""
_MAX_DOTS: Final = 32
"""Maximum dots in a line of TOML, besides those of fractions."""
_FRACTION: Final = re.compile(r"(?<![\w.])[0-9]+\.[0-9]+(?:[eE][-+]?[0-9]+)?(?![\w.])")


def open_regular(path: PurePath, error: type[ShardSpecError]) -> int:
    """Open a regular file and return its descriptor; raises `error` for pipes and devices."""
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


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raises `ValueError` for invalid text, or text that would take long to parse.

    The time and memory of `tomllib` grow with the square of the parts of a dotted key.
    """
    lines = (line for line in text.splitlines() if line.count(".") > _MAX_DOTS)
    if any(_FRACTION.sub("", line).count(".") > _MAX_DOTS for line in lines):
        raise ValueError(f"a line has more than {_MAX_DOTS} dots; write it in several lines")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(_problem(error)) from None


def _problem(error: Exception) -> str:
    """Return what is wrong with a text that a parser refuses."""
    if isinstance(error, RecursionError):
        return "it nests too deep"
    # Python's limit on digits is the one error that parsers pass on as it is.
    return "a number has thousands of digits" if type(error) is ValueError else str(error)


def read_json_object(path: PurePath) -> dict[str, object]:
    """Return the JSON object in a file, such as a model's config; raises `InputFileError`."""
    try:
        value = json.loads(read_input_file(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: cannot be read: {_problem(error)}") from None
    if not isinstance(value, dict):
        raise InputFileError(f"{path}: is not a JSON object, such as a model's config")
    return value
