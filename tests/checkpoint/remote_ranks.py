"""What each of several processes does that write to a store together; it imports little."""

import os
from collections.abc import Mapping
from typing import Any

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.coordinate import Member
from shardspec.errors import ShardSpecError

__all__ = ["write"]


def write(
    rank: int, size: int, source: str, out: str, options: dict[str, Any], where: Mapping[str, str]
) -> list[Any]:
    """Merge or reshard; return what there is to say."""
    os.environ.update(where)
    options = dict(options)
    act: Any = merge
    if "device_mesh" in options:
        act, options["device_mesh"] = reshard, DeviceMesh(range(6), tuple(options["device_mesh"]))
    try:
        report = act(source, out, member=Member(rank, size), **options)
    except ShardSpecError as error:
        return [type(error).__name__, str(error), []]
    return [None, report.crc32, list(report.files)]
