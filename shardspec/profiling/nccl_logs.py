"""Reads logs of nccl-tests."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.comm.cluster_file import LinkPreset
from shardspec.comm.curves import PERMUTE_KIND
from shardspec.errors import ProfileError
from shardspec.input_files import read_input_file
from shardspec.profiling.fit import Timing, fitted_links

_KINDS: Final = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "sendrecv": PERMUTE_KIND,
}
_MOST_BYTES: Final = 64 << 20
_RANK: Final = re.compile(r"^#\s+Rank\s+\d+ .*\bon\s+(\S+)\s+device\b", re.MULTILINE)
_VERSION: Final = re.compile(r"nccl-library=(\S+)|NCCL version ([\w.+]+)")
_TEST: Final = re.compile(r"(all_gather|reduce_scatter|all_reduce|alltoall|sendrecv|\w+)_perf")


class Log(NamedTuple):
    """The times of one run of nccl-tests, out of place."""

    run: Timing
    version: str | None


def read_log(path: Path, nodes: int | None = None) -> Log:
    """Return the times of a log; `nodes` is the number of hosts where it does not tell.

    Raises `ProfileError` if the file is not such a log, or has no times out of place.
    """
    text = read_input_file(path, _MOST_BYTES).decode("utf-8", "replace")
    named = _TEST.search(text) or _TEST.search(path.name)
    if named is None or named[1] not in _KINDS:
        what = f"of {named[1]}_perf" if named else "of no collective"
        raise ProfileError(f"{path}: is a log {what}; known: {', '.join(_KINDS)} of nccl-tests")
    hosts = _RANK.findall(text)
    count = nodes or len(set(hosts))
    if not hosts or len(hosts) % count:
        raise ProfileError(
            f"{path}: {len(hosts)} lines with ranks for {count} hosts; keep the log's header, or "
            "give another number of hosts"
        )
    versions = {match[1] or match[2] for match in _VERSION.finditer(text)}
    if len(versions) > 1:
        raise ProfileError(f"{path}: is of two NCCL versions, {', '.join(sorted(versions))}")
    times: dict[int, float] = {}
    columns: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["#"] and {"size", "time"} <= set(words):
            columns = words[1:]
        elif columns and words and words[0].isdecimal() and len(words) >= columns.index("time"):
            time = words[columns.index("time")]
            if re.fullmatch(r"[0-9.]+(e[+-]?\d+)?", time) and float(time) > 0:
                times[int(words[0])] = float(time) / 1e6
    times.pop(0, None)
    if len(times) < 2:
        raise ProfileError(
            f"{path}: has {len(times)} times out of place; give a log with two sizes or more"
        )
    return Log(Timing(_KINDS[named[1]], len(hosts), count, times), next(iter(versions), None))


def links_of_logs(logs: Sequence[Log], name: str, between: str | None = None) -> LinkPreset:
    """Return the links that fit logs; raises `ProfileError` if two versions of NCCL made them."""
    versions = sorted({log.version for log in logs if log.version is not None})
    if len(versions) > 1:
        raise ProfileError(f"the logs are of NCCL {' and '.join(versions)}; give those of one")
    source = f"nccl-tests, NCCL {versions[0]}" if versions else "nccl-tests"
    return fitted_links(name, [log.run for log in logs], between, source)
