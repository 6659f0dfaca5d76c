"""Reads and writes files on disks of this machine and in object stores."""

import re
from pathlib import PurePath
from typing import Final

from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.storage.object_store import ObjectPath
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.errors import CheckpointError

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")


def storage_path(place: PurePath | str) -> StoragePath:
    """Return a `LocalPath`, or for a URL an `ObjectPath`; raises CheckpointError for "".

    >>> storage_path("s3://a/b"), storage_path("file:///tmp/a"), storage_path("a:/b")
    (ObjectPath('s3://a/b'), LocalPath('/tmp/a'), LocalPath('a:/b'))
    """
    if isinstance(place, StoragePath):
        return place
    if isinstance(place, PurePath):
        return LocalPath(place)
    if not isinstance(place, str):
        raise CheckpointError(f"a {type(place).__name__} is not a path; give text or a Path")
    if not place:
        raise CheckpointError("an empty text is not a path; '.' is the working directory")
    scheme, mark, rest = place.partition("://")
    if not mark or _SCHEME.fullmatch(scheme) is None:
        return LocalPath(place)
    return LocalPath(rest) if scheme in ("file", "local") else ObjectPath(place)
