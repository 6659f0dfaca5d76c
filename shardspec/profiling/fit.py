"""Fits curves of collectives, and the links of a cluster, to measured times.

A curve is the minimum of two lines, one for a protocol of low latency and one for high bandwidth.
They meet at the size that fits best. The fit minimizes relative errors, with Huber's weights for
outliers (iteratively reweighted least squares). Reported errors are leave-one-out: each size is
predicted by a fit to the other sizes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cluster_file import LinkPreset
from shardspec.comm.curves import KINDS, PERMUTE_KIND, Curve, Line, Link, exchange_floor
from shardspec.comm.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Step
from shardspec.errors import ProfileError
from shardspec.input_files import read_input_file
from shardspec.text import bytes_text, seconds_text

Floats: TypeAlias = npt.NDArray[np.float64]
Times: TypeAlias = Sequence[tuple[float, float]]
"""(bytes of the whole buffer, seconds), by ascending size."""

_ROUNDS: Final = 8
_TRUSTED: Final = 0.2
"""Relative error up to which a measurement has full weight."""
_FEWEST: Final = 6
"""Minimum number of measurements for a curve of two lines."""


def _line_of(x: Floats, y: Floats, seconds: Floats) -> Line:
    """Return nonnegative (a, b) for which a * x + b * y fits the seconds best."""
    x, y = x / seconds, y / seconds
    weights = np.ones(len(seconds))
    best = (0.0, 0.0)
    for _ in range(_ROUNDS):
        best = _nonnegative(x * weights, y * weights, weights)
        errors = np.abs(best[0] * x + best[1] * y - 1)
        weights = np.sqrt(np.minimum(1.0, _TRUSTED / np.maximum(errors, 1e-12)))
    return best


def _nonnegative(x: Floats, y: Floats, right: Floats) -> Line:
    """Return the least-squares solution for two nonnegative unknowns; one of them may be 0."""
    (a, b), *_ = np.linalg.lstsq(np.stack([x, y], axis=1), right)
    if a >= 0 and b >= 0:
        return float(a), float(b)
    edges = [(float(x @ right / (x @ x)), 0.0), (0.0, float(y @ right / (y @ y)))]
    return min(edges, key=lambda edge: np.linalg.norm(edge[0] * x + edge[1] * y - right))


def candidate_lines(times: Times) -> list[tuple[float, tuple[Line, ...]]]:
    """Return candidate curves as (distance to the measured times, lines), nearest first."""
    size, seconds = np.array(times, dtype=np.float64).T

    def fit(*parts: slice) -> tuple[Line, ...]:
        return tuple(_line_of(np.ones(len(size[p])), size[p], seconds[p]) for p in parts)

    def distance(lines: Iterable[Line]) -> float:
        predicted = np.min([fixed + slope * size for fixed, slope in lines], axis=0)
        off = np.abs(np.log(np.maximum(predicted, 1e-12) / seconds))
        return float(np.minimum(off, 1.0).mean())

    candidates = [fit(slice(None))]
    if len(size) >= _FEWEST:
        candidates += [fit(slice(at), slice(at, None)) for at in range(2, len(size) - 1)]
    return sorted((distance(lines), tuple(sorted(lines))) for lines in candidates)


def fit_curve(
    kind: str,
    devices: int,
    times: Times,
    accepts: Callable[[Curve], bool] = lambda _: True,
    nodes: int = 1,
) -> Curve:
    """Return the best-fitting curve for which `accepts` is true; without one, the best of all."""
    sizes = int(times[0][0]), int(times[-1][0])
    candidates = (lines for _, lines in candidate_lines(times))
    near = [Curve(kind, devices, lines, sizes, nodes) for lines in candidates]
    return next(filter(accepts, near), near[0])


def unseen_errors(times: Times, fit: Callable[[Times], Curve]) -> list[float]:
    """Return the relative error at each size of a curve that was fitted to the other sizes."""
    errors = []
    for place, (size, seconds) in enumerate(times) if len(times) > 2 else ():
        without = fit([*times[:place], *times[place + 1 :]])
        errors.append(abs(without.seconds(size) / seconds - 1))
    return errors


def middle_and_most(errors: Sequence[float]) -> tuple[float, float] | None:
    """Return the median and the 90th percentile of errors; None if there are none.

    >>> middle_and_most([0.1, 0.2, 0.3])
    (0.2, 0.28)
    """
    if not errors:
        return None
    median, most = np.quantile(errors, (0.5, 0.9))
    return float(median), float(most)


def step_of(kind: str, axes: tuple[int, ...]) -> Step:
    """Return the step for one of `KINDS`, on a tensor of two dims.

    >>> step_of("all-gather", (0,))
    AllGather(dim=0, axes=(0,))
    """
    steps: dict[str, Step] = {
        "all-gather": AllGather(0, axes),
        "reduce-scatter": ReduceScatter(0, axes, "sum"),
        "all-reduce": AllReduce(axes, "sum"),
        "all-to-all": AllToAll(0, 1, axes, axes),
    }
    return steps[kind]


class Timing(NamedTuple):
    """Measured times of one collective on some devices."""

    kind: str
    """One of `KINDS`, or `PERMUTE_KIND` or `EXCHANGE_KIND`."""
    devices: int
    nodes: int
    times: Mapping[int, float]
    """Seconds by bytes of the whole buffer."""


def fitted_links(
    name: str, runs: Sequence[Timing], between: str | None = None, source: str = ""
) -> LinkPreset:
    """Return the links of a cluster that fit measured times.

    `between` is the preset of the link between hosts, used if no run spans several hosts. Runs of
    one collective on equally many devices make one curve. Raises `ProfileError` if no run is inside
    one host.
    """
    times: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        times[run.kind, run.devices, run.nodes] += run.times.items()
    links: list[Link | None] = []
    for several in (False, True):
        fitted = [
            (points, partial(fit_curve, kind, devices, nodes=nodes))
            for (kind, devices, nodes), points in sorted(times.items())
            if (nodes > 1) == several and len(dict(points)) > 1
        ]
        curves = tuple(fit(sorted(points)) for points, fit in fitted)
        errors = [each for points, fit in fitted for each in unseen_errors(sorted(points), fit)]
        start, per_byte = exchange_floor(curves)
        named = f"{name} between hosts" if several else name
        link = Link(0.0, per_byte, named, start, curves, error=middle_and_most(errors))
        links.append(link if curves else None)
    inside, joining = links
    if inside is None or not any(curve.kind in KINDS for curve in inside.curves):
        raise ProfileError("no measured collective is inside one host; measure one")
    room = max(run.devices // run.nodes for run in runs) if joining or between else None
    today = datetime.now(UTC).date().isoformat()
    return LinkPreset(name, inside, joining or between, room, source=source, read_on=today)


def fit_rows(preset: LinkPreset) -> list[list[str]]:
    """Return for each curve its collective, devices, hosts, sizes, latency and rate as text."""
    return [
        [
            curve.kind,
            str(curve.devices),
            str(curve.nodes),
            " to ".join(map(bytes_text, curve.sizes)),
            *map(line_text, (curve.lines[0], curve.lines[-1])),
        ]
        for link in (preset.inside, preset.between)
        if isinstance(link, Link)
        for curve in link.curves
    ]


def line_text(line: Line) -> str:
    """Return a line as text: its seconds, and its rate.

    >>> line_text((2e-5, 1e-11))
    '20 µs + 100 GB/s'
    """
    rate = f"{1e-9 / line[1]:.4g} GB/s" if line[1] else "free"
    return f"{seconds_text(line[0])} + {rate}"


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
    """The out-of-place times of one run of nccl-tests."""

    run: Timing
    version: str | None


def read_log(path: Path, nodes: int | None = None) -> Log:
    """Return the times of a log of nccl-tests; `nodes` replaces its number of hosts.

    Raises `ProfileError` if the file is not such a log, or has no out-of-place times.
    """
    text = read_input_file(path, _MOST_BYTES).decode("utf-8", "replace")
    named = _TEST.search(text) or _TEST.search(path.name)
    if named is None or named[1] not in _KINDS:
        tested = f"of {named[1]}_perf" if named else "without a known collective"
        raise ProfileError(f"{path}: is a log {tested}; give one of {', '.join(_KINDS)}")
    hosts = _RANK.findall(text)
    count = nodes or len(set(hosts))
    if not hosts or len(hosts) % count:
        raise ProfileError(
            f"{path}: {len(hosts)} lines with ranks for {count} hosts; keep the log's header, or "
            "give another number of hosts"
        )
    versions = {match[1] or match[2] for match in _VERSION.finditer(text)}
    if len(versions) > 1:
        raise ProfileError(f"{path}: is a log of two NCCL versions: {', '.join(sorted(versions))}")
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
            f"{path}: has {len(times)} out-of-place times; give a log with two sizes or more"
        )
    return Log(Timing(_KINDS[named[1]], len(hosts), count, times), next(iter(versions), None))


def links_of_logs(logs: Sequence[Log], name: str, between: str | None = None) -> LinkPreset:
    """Return the links that fit logs; raises `ProfileError` if two versions of NCCL made them."""
    versions = sorted({log.version for log in logs if log.version is not None})
    if len(versions) > 1:
        raise ProfileError(f"logs are of NCCL {' and '.join(versions)}; give one version's logs")
    source = f"nccl-tests, NCCL {versions[0]}" if versions else "nccl-tests"
    return fitted_links(name, [log.run for log in logs], between, source)
