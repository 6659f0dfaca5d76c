"""The checksums of deltas, and the packages that these need."""

import zlib
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from shardspec.errors import CheckpointError
from shardspec.text import shown


class Hash(Protocol):
    """A checksum that is taken piece by piece."""

    def update(self, data: Any, /) -> None:  # noqa: ANN401
        """Take in bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all so far."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:  # noqa: ANN401
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_hash(name: str, where: object) -> Hash:
    """Return a checksum by its name in the index; CheckpointError if it is not known."""
    if name == "adler32":
        return _Adler32()
    if name == "xxh3-128":
        found: Hash = extra("xxhash").xxh3_128()
        return found
    raise CheckpointError(
        f"{where}: has checksums of {shown(name)}, but xxh3-128 and adler32 are read; publish it "
        "with one of these"
    )


def extra(name: str) -> ModuleType:
    """Import a package of the extra `delta`; CheckpointError says how to get it."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise CheckpointError(
            f"deltas need the package {name}: pip install 'shardspec[delta]'"
        ) from None
