"""Reads logs of nccl-tests and fits the links and curves of a cluster to their times."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.comm.cluster import Cluster
from shardspec.comm.curves import Curve, Link, exchange_floor
from shardspec.comm.presets import link_preset
from shardspec.errors import ProfileError
from shardspec.input_files import read_input_file
from shardspec.profiling.fit import fit_curve

_KINDS: Final = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "sendrecv": "sendrecv",
}
_MOST_BYTES: Final = 64 << 20
_RANK: Final = re.compile(r"^#\s+Rank\s+\d+ .*\bon\s+(\S+)\s+device\b", re.MULTILINE)
_VERSION: Final = re.compile(r"nccl-library=(\S+)|NCCL version ([\w.+]+)")
_TEST: Final = re.compile(r"(all_gather|reduce_scatter|all_reduce|alltoall|sendrecv|\w+)_perf")


class Log(NamedTuple):
    """The times of one run of nccl-tests."""

    kind: str
    ranks: int
    nodes: int
    version: str | None
    times: dict[int, float]
    """Seconds by bytes of the whole buffer, out of place."""


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
    return Log(_KINDS[named[1]], len(hosts), count, next(iter(versions), None), times)


def cluster_of_logs(logs: Sequence[Log], between: str | None = None) -> Cluster:
    """Return the cluster that fits the times of logs.

    `between` names the link between hosts, where no log is of several. Raises `ProfileError` if
    logs are of two versions of NCCL, or none is of one host.
    """
    versions = sorted({log.version for log in logs if log.version is not None})
    if len(versions) > 1:
        raise ProfileError(f"the logs are of NCCL {' and '.join(versions)}; give those of one")
    times: dict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
    for log in logs:
        times[log.kind, log.ranks, log.nodes] |= log.times
    curves: dict[bool, list[Curve]] = {False: [], True: []}
    pairs: dict[bool, list[Curve]] = {False: [], True: []}
    for (kind, ranks, nodes), points in sorted(times.items()):
        curve = fit_curve(kind, ranks, sorted(points.items()), nodes=nodes)
        # What a rank sends to one other is what an all-to-all of two sends of twice the buffer.
        (pairs if kind == "sendrecv" else curves)[nodes > 1].append(curve)
    if not curves[False]:
        raise ProfileError("no log is of a collective inside one host; give one")
    inside = _link("inside hosts", curves[False], pairs[False])
    per_node = max(log.ranks // log.nodes for log in logs)
    joining = link_preset(between) if between is not None else None
    if curves[True] or pairs[True]:
        joining = _link("between hosts", curves[True], pairs[True])
    return Cluster(inside, joining, per_node if joining else None)


def _link(name: str, curves: Sequence[Curve], pairs: Sequence[Curve]) -> Link:
    """Return a link with curves, by which no exchange undercuts what was measured."""
    start, per_byte = exchange_floor(curves)
    for pair in pairs:
        fixed, slope = min(pair.lines, key=lambda line: line[1])
        start, per_byte = max(start, fixed), max(per_byte, slope)
    return Link(0.0, per_byte, name, start, tuple(curves))


def fit_rows(cluster: Cluster, logs: Iterable[Log]) -> list[list[str]]:
    """Return for each log its collective, ranks, hosts, sizes, and how far the fit is off."""
    rows = []
    links = [cluster.inside, *([cluster.between] if cluster.between else [])]
    known = {(c.kind, c.devices, c.nodes): c for link in links for c in link.curves}
    for log in logs:
        curve = known.get((log.kind, log.ranks, log.nodes))
        if curve is not None:
            off = sorted(abs(curve.seconds(size) / time - 1) for size, time in log.times.items())
            median, most = off[len(off) // 2], off[int(0.9 * (len(off) - 1))]
            numbers = [str(log.ranks), str(log.nodes), str(len(off))]
            rows.append([log.kind, *numbers, f"{median:.0%}", f"{most:.0%}"])
    return rows
