"""Describes links of mesh axes, and curves: measured seconds of collectives by bytes.

>>> curve = Curve("all-gather", 8, ((1e-5, 4e-12), (4e-5, 2e-12)), (512, 1 << 30))
>>> [round(curve.seconds(num_bytes) * 1e6) for num_bytes in (10**6, 10**9)]  # microseconds
[14, 2040]

A curve is the minimum of a few lines ``latency + bytes * seconds_per_byte``, because communication
libraries have one protocol for low latency and another for high bandwidth. Bytes are those of the
whole buffer, as in nccl-tests: the gathered or reduced data, or one rank's data in an all-to-all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, product
from math import ceil, prod
from typing import Final, Literal, TypeAlias

from shardspec.comm import steps
from shardspec.comm.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Step
from shardspec.errors import MeshError
from shardspec.mesh.device_ids import SECONDS_RULE, seconds
from shardspec.text import shown

KINDS: Final = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
"""The collectives that have curves."""
_KIND_OF: Final = dict(zip((AllGather, ReduceScatter, AllReduce, AllToAll), KINDS, strict=True))

PERMUTE_KIND: Final = "permute"
"""Kind of a curve for sending a shard to one device while receiving another."""
EXCHANGE_KIND: Final = "exchange"
"""Kind of a curve for an exchange that moves the boxes of an all-to-all."""

Line: TypeAlias = tuple[float, float]
"""Fixed seconds, and seconds per byte."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one collective on a fixed number of devices, as a function of bytes."""

    kind: str
    devices: int
    lines: tuple[Line, ...]
    sizes: tuple[int, int]
    """The least and the most bytes that were measured; (0, 0) without measurements."""
    nodes: int = 1
    """Number of hosts, each with the same number of the devices."""

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds for a buffer of `num_bytes`."""
        return min(fixed + slope * num_bytes for fixed, slope in self.lines)

    def lines_by_shard(self) -> tuple[Line, ...]:
        """Return (seconds, seconds per byte) lines, per byte of a shard before the step."""
        factor = bytes_ratio(self.kind, self.devices)
        return tuple((fixed, slope * factor) for fixed, slope in self.lines)


@dataclass(frozen=True, slots=True)
class Link:
    """The speed of data transfer along one mesh axis.

    Parameters
    ----------
    latency_s, seconds_per_byte
        Seconds per message, and the inverse of the bandwidth in one direction.
    name
        The origin of the numbers.
    start_s
        Seconds to start a step, in addition to its messages.
    curves
        Measured curves of collectives along such links, used instead of the numbers.
    port
        For an axis that joins nodes: "device" if each device has a port, "node" if they share one.
    per_node, within
        For an axis that joins nodes: the number of its devices in one node, and their link.
    room
        For a link inside nodes: the most devices of a node; None if unknown.
    error
        Relative error of the curves at the median and at the 90th percentile, over times not used
        in the fit; None if unknown.

    Raises
    ------
    MeshError
        If a number is neither 0 nor from 1e-100 to 1e9, or `per_node` is above 1 without `port` and
        `within`.

    Examples
    --------
    >>> str(Link(latency_s=1e-5, seconds_per_byte=2e-11))
    'given: 10 µs, 50 GB/s'
    """

    latency_s: float
    seconds_per_byte: float
    name: str = "given"
    start_s: float = 0.0
    curves: tuple[Curve, ...] = field(default=(), hash=False)  # dozens; models are looked up often
    port: Literal["device", "node"] | None = None
    per_node: int = 1
    within: "Link | None" = None
    room: int | None = None
    error: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.per_node != 1 and not (self.per_node > 1 and self.port and self.within):
            raise MeshError(
                f"link {shown(self.name)} has {shown(self.per_node)} devices in a node; give port= "
                "and within=, the link inside the node"
            )
        for key in ("latency_s", "seconds_per_byte", "start_s"):
            number = seconds(getattr(self, key))
            if number is None:
                raise MeshError(
                    f"link {shown(self.name)} has latency {shown(self.latency_s)} s, "
                    f"{shown(self.seconds_per_byte)} s a byte and start {shown(self.start_s)} s; "
                    f"give finite numbers ({SECONDS_RULE}), none negative"
                )
            object.__setattr__(self, key, number)

    def __str__(self) -> str:
        rate = f"{1e-9 / self.seconds_per_byte:.4g} GB/s" if self.seconds_per_byte else "free"
        numbers = f"{(self.start_s + self.latency_s) * 1e6:.4g} µs, {rate}"
        if self.within is not None:
            return f"{self.name}: {numbers}; in nodes of {self.per_node} each, {self.within}"
        if not self.curves:
            return f"{self.name}: {numbers}"
        devices = ", ".join(map(str, self._measured_devices))
        otherwise = numbers.replace(", ", " + ")
        return f"{self.name} (measured for {devices} devices; otherwise {otherwise})"

    def as_dict(self) -> dict[str, object]:
        """Return the numbers, and the device counts of measured collectives, ready for JSON."""
        keys = ("latency_s", "seconds_per_byte", "name", "start_s")
        values: dict[str, object] = {key: getattr(self, key) for key in keys}
        if self.within is not None:
            values |= {"per_node": self.per_node, "within": self.within.as_dict()}
        return values | {"measured_devices": self._measured_devices}

    @property
    def _measured_devices(self) -> list[int]:
        return sorted({curve.devices for curve in self.curves if curve.kind in KINDS})


def share(kind: str, devices: int) -> Fraction:
    """Return the bytes that a device receives per byte of the whole buffer.

    >>> share("all-gather", 4), share("all-reduce", 4)
    (Fraction(3, 4), Fraction(3, 2))
    """
    if kind == PERMUTE_KIND:
        return Fraction(1)
    return Fraction((2 if kind == "all-reduce" else 1) * (devices - 1), devices)


def bytes_ratio(kind: str, devices: int) -> int:
    """Return the bytes of the whole buffer per byte of a shard before the step."""
    return devices if kind == "all-gather" else 1


def curve_between(curves: Sequence[Curve], kind: str, devices: int) -> Curve | None:
    """Return the curve of a collective on a number of devices, interpolated if not measured.

    None below the smallest measured number of devices. Above the largest, the curve is
    extrapolated and its `sizes` are (0, 0). docs/plans.md has the rules.

    >>> few = Curve("all-gather", 2, ((1e-5, 1e-12),), (512, 1 << 29))
    >>> many = Curve("all-gather", 8, ((4e-5, 4e-12),), (512, 1 << 29))
    >>> [round(curve_between([few, many], "all-gather", n).seconds(0) * 1e6) for n in (2, 4, 15)]
    [10, 20, 80]
    """
    own = {curve.devices: curve for curve in curves if curve.kind == kind}
    below = max((n for n in own if n <= devices), default=None)
    above = min((n for n in own if n > devices), default=None)
    if below is None or below == devices:
        return own.get(devices)
    near = own[below]
    if above is None:
        hops = (devices - 1) / (below - 1)
        grown = float(share(kind, devices) / share(kind, below))
        lines = tuple((fixed * hops, slope * grown) for fixed, slope in near.lines)
        return Curve(kind, devices, lines, (0, 0))
    far, part = own[above], (devices - below) / (above - below)
    lines = lines_between(near.lines, far.lines, part)
    sizes = max(near.sizes[0], far.sizes[0]), min(near.sizes[1], far.sizes[1])
    return Curve(kind, devices, lines, sizes)


def lines_between(near: Sequence[Line], far: Sequence[Line], part: float) -> tuple[Line, ...]:
    """Return (seconds, seconds per byte) lines whose minimum interpolates between two curves.

    >>> lines_between([(10.0, 1.0)], [(30.0, 2.0)], 0.5)
    ((20.0, 1.5),)
    """
    return tuple(
        ((1 - part) * a[0] + part * b[0], (1 - part) * a[1] + part * b[1])
        for a, b in product(near, far)
    )


def exchange_floor(curves: Iterable[Curve]) -> Line:
    """Return the lowest price of an exchange, as (seconds, seconds per received byte).

    Inside a host, an exchange is not cheaper than a measured collective. Between hosts only bytes
    from other hosts count: half of an all-to-all on two hosts. A ring of an all-gather uses the
    ports of all devices of a host, so it counts only if nothing else was measured. Reductions count
    if there is nothing else either.

    >>> exchange_floor([Curve("all-gather", 2, ((1e-5, 1e-12),), (512, 1 << 29))])
    (1e-05, 2e-12)
    """
    ranked = [(_directness(curve), curve) for curve in curves]
    best = min((rank for rank, _ in ranked), default=0)
    costs = [
        [(fixed, slope / float(_bytes_of_device(curve))) for fixed, slope in curve.lines]
        for rank, curve in ranked
        if rank == best
    ]
    per_byte = max((min(slope for _, slope in lines) for lines in costs), default=0.0)
    crossings = (
        max(0.0, (c - a) / (b - d)) if b != d else 0.0
        for lines in costs
        for (a, b), (c, d) in combinations(lines, 2)
    )
    sizes = (0.0, *crossings)
    start = max(
        (
            min(fixed + (slope - per_byte) * size for fixed, slope in lines)
            for lines in costs
            for size in sizes
        ),
        default=0.0,
    )
    return max(start, 0.0), per_byte


def _directness(curve: Curve) -> int:
    """Return 0 if bytes go straight to their receiver, 1 if they are forwarded, 2 if summed."""
    return 2 * ("reduce" in curve.kind) + (curve.kind == "all-gather" and curve.nodes > 1)


def _bytes_of_device(curve: Curve) -> Fraction:
    """Return the bytes that a device receives (with several hosts: from others) per buffer byte."""
    received, each = share(curve.kind, curve.devices), curve.devices // curve.nodes
    if curve.nodes == 1 or curve.kind == PERMUTE_KIND:
        return received
    if curve.kind in ("all-to-all", EXCHANGE_KIND):
        return Fraction(curve.devices - each, curve.devices)
    return received / each


def copies(step: Step, devices: int) -> int:
    """Return the number of local copies of its shard that a device makes in a collective.

    >>> copies(AllGather(0, (0,)), 4), copies(AllGather(1, (0,)), 4)
    (0, 4)
    """
    match step:
        case AllGather(dim):
            return devices if dim else 0
        case ReduceScatter(dim):
            return int(dim > 0)
        case AllToAll(src_dim, dst_dim):
            return (src_dim > 0) + (dst_dim > 0)
        case _:
            return 0


def kind_of(step: Step) -> str | None:
    """Return the name of a step in `KINDS`; None if it is not a collective."""
    return _KIND_OF.get(type(step))


def bytes_received(step: Step, mesh_shape: Sequence[int], num_bytes: int) -> int:
    """Return the bytes that a device receives in a step if it uses the fewest bytes possible.

    >>> bytes_received(AllReduce((1,), "sum"), (2, 4), 100)
    150
    """
    assert not isinstance(step, steps.Permute | steps.Exchange), "counted from both layouts"
    n, kind = prod(mesh_shape[axis] for axis in step.axes), kind_of(step)
    return 0 if kind is None else ceil(num_bytes * share(kind, n) * bytes_ratio(kind, n))
