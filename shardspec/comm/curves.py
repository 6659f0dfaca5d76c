"""Links of mesh axes, and curves of the collectives that were measured along them.

A curve is the lowest of a few lines ``latency + bytes * seconds_per_byte``: a communication library
has a protocol of low latency and one of high bandwidth, and takes the faster one. Bytes are those
of the whole buffer, as nccl-tests counts them: what is gathered or reduced, or what one rank of an
all-to-all holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from typing import Final, Literal, TypeAlias

from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Step,
)

KINDS: Final = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
"""The collectives that have curves."""
_COLLECTIVES: Final = dict(zip((AllGather, ReduceScatter, AllReduce, AllToAll), KINDS, strict=True))

LARGE: Final = 1 << 20
"""Bytes from which on errors are told apart from those of smaller buffers."""

Line: TypeAlias = tuple[float, float]
"""Seconds whatever the size, and seconds a byte."""


@dataclass(frozen=True, slots=True)
class Band:
    """How far prices were from measurements that their fit had not seen, as fractions."""

    median: float
    most: float
    """The 90th percentile."""

    def __str__(self) -> str:
        return (
            f"{self.median * 100:.0f} % off at the median, {self.most * 100:.0f} % at the 90th "
            "percentile"
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one collective on one number of devices, by the bytes of the whole buffer."""

    kind: str
    """One of `KINDS`."""
    devices: int
    lines: tuple[Line, ...]
    """The lowest applies."""
    sizes: tuple[int, int]
    """Bytes from and to which was measured."""
    errors: tuple[Band | None, Band | None] = (None, None)
    """Below `LARGE`, and from there on."""
    left_out: tuple[Band | None, Band | None] = (None, None)
    """Likewise when this number of devices is priced from its neighbours."""

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds for a buffer of so many bytes."""
        return min(fixed + slope * num_bytes for fixed, slope in self.lines)

    def as_dict(self) -> dict[str, object]:
        """Return the curve as plain values, ready for JSON."""
        return {
            "collective": self.kind,
            "devices": self.devices,
            "lines": [list(line) for line in self.lines],
            "sizes": list(self.sizes),
            "errors": [band and [band.median, band.most] for band in self.errors],
        }

    def error(self, num_bytes: float) -> Band | None:
        """Return how far such a price is off; None where nothing was measured."""
        least, most = self.sizes
        return self.errors[num_bytes >= LARGE] if least <= num_bytes <= most else None


@dataclass(frozen=True, slots=True)
class Link:
    """How fast data travels along one mesh axis.

    Examples
    --------
    >>> str(Link(latency_s=1e-5, seconds_per_byte=2e-11))
    'given: 10 µs, 50 GB/s'
    """

    latency_s: float
    """Start-up latency: seconds a message."""
    seconds_per_byte: float
    """Transfer cost: the inverse of the bandwidth in one direction."""
    name: str = "given"
    """Where the numbers come from."""
    start_s: float = 0.0
    """Seconds that a step takes to start, beside its messages."""
    curves: tuple[Curve, ...] = ()
    """What was measured along such links; in place of the two numbers where there is a curve."""
    port: Literal["device", "node"] | None = None
    """Of an axis that joins nodes: whether each device has a port, or all devices of a node share
    one; None for links inside a node, and where nothing is known about nodes."""

    def __str__(self) -> str:
        rate = f"{1e-9 / self.seconds_per_byte:.4g} GB/s" if self.seconds_per_byte else "free"
        numbers = f"{(self.start_s + self.latency_s) * 1e6:.4g} µs, {rate}"
        if not self.curves:
            return f"{self.name}: {numbers}"
        devices = ", ".join(map(str, sorted({curve.devices for curve in self.curves})))
        return f"{self.name}: curves of {devices} devices, else {numbers}"

    def as_dict(self) -> dict[str, object]:
        """Return the numbers ready for JSON, and on how many devices collectives were measured."""
        return {
            "latency_s": self.latency_s,
            "seconds_per_byte": self.seconds_per_byte,
            "name": self.name,
            "start_s": self.start_s,
            "measured_devices": sorted({curve.devices for curve in self.curves}),
        }

    def __hash__(self) -> int:
        # Of its curves there are dozens, and models are looked up often.
        return hash((self.latency_s, self.seconds_per_byte, self.name, self.start_s))


def share(kind: str, devices: int) -> Fraction:
    """Return the bytes that a device receives per byte of the whole buffer."""
    return Fraction((2 if kind == "all-reduce" else 1) * (devices - 1), devices)


def whole(kind: str, devices: int) -> int:
    """Return the bytes of the whole buffer per byte that a device holds before the step."""
    return devices if kind == "all-gather" else 1


def curve_between(curves: Sequence[Curve], kind: str, devices: int) -> Curve | None:
    """Return the curve of a collective on a number of devices, measured or not.

    Between two numbers that were measured, the seconds for the same whole buffer lie on a straight
    line over the number of devices. Beyond the largest, latency grows as the steps of a ring and
    the rest as the bytes that a device receives, and no error is known. None where the collective
    was not measured at all, or only on more devices.

    >>> few = Curve("all-gather", 2, ((1e-5, 1e-12),), (512, 1 << 29))
    >>> many = Curve("all-gather", 8, ((4e-5, 4e-12),), (512, 1 << 29))
    >>> [round(curve_between([few, many], "all-gather", n).seconds(0) * 1e6) for n in (2, 4, 15)]
    [10, 20, 80]
    """
    own = {curve.devices: curve for curve in curves if curve.kind == kind}
    if devices in own or not own:
        return own.get(devices)
    below = max((n for n in own if n < devices), default=None)
    above = min((n for n in own if n > devices), default=None)
    if below is None:
        return None
    near = own[below]
    if above is None:
        steps = (devices - 1) / (below - 1)
        grown = float(share(kind, devices) / share(kind, below))
        lines = tuple((fixed * steps, slope * grown) for fixed, slope in near.lines)
        return Curve(kind, devices, lines, near.sizes)
    far, part = own[above], (devices - below) / (above - below)
    lines = tuple(
        ((1 - part) * a[0] + part * b[0], (1 - part) * a[1] + part * b[1])
        for a in near.lines
        for b in far.lines
    )
    sizes = max(near.sizes[0], far.sizes[0]), min(near.sizes[1], far.sizes[1])
    # The number between that was left out once lies nearest.
    errors = next(
        (
            curve.left_out
            for curve in sorted(own.values(), key=lambda c: abs(c.devices - devices))
            if curve.left_out != (None, None)
        ),
        (None, None),
    )
    return Curve(kind, devices, lines, sizes, errors)


def copies(step: Step, devices: int) -> int:
    """Return how often a device copies what it holds, to pack and unpack, in a collective."""
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
    """Return which of `KINDS` a step is; None for one that is no collective."""
    return _COLLECTIVES.get(type(step))


def bytes_received(step: Step, mesh_shape: Sequence[int], num_bytes: int) -> int:
    """Return the bytes that a device receives in a step, by a bandwidth-optimal algorithm.

    `num_bytes` are those of the largest shard before the step. Permutes and exchanges are counted
    from the layouts on both sides instead.

    >>> bytes_received(AllGather(0, (1,)), (2, 4), 100)
    300
    >>> bytes_received(AllReduce((1,), "sum"), (2, 4), 100)
    150
    """
    assert not isinstance(step, Permute | Exchange), "counted from the layouts on both sides"
    n, kind = prod(mesh_shape[axis] for axis in step.axes), kind_of(step)
    return 0 if kind is None else ceil(num_bytes * share(kind, n) * whole(kind, n))
