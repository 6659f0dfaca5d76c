"""Links of mesh axes, and curves of the collectives that were measured along them.

A curve is the lowest of a few lines ``latency + bytes * seconds_per_byte``: a communication library
has a protocol of low latency and one of high bandwidth, and takes the faster one. Bytes are those
of the whole buffer, as nccl-tests counts them: what is gathered or reduced, or what one rank of an
all-to-all holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
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

__all__ = [
    "KINDS",
    "LARGE",
    "Band",
    "Curve",
    "Line",
    "Link",
    "bytes_received",
    "copies",
    "curve_between",
    "curves_of",
    "kind_of",
    "share",
    "whole",
]

KINDS: Final = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
"""The collectives that have curves."""
_COLLECTIVES: Final = dict(zip((AllGather, ReduceScatter, AllReduce, AllToAll), KINDS, strict=True))

LARGE: Final = 1 << 20
"""Bytes from which on errors are told apart from those of smaller buffers."""

Line: TypeAlias = tuple[float, float]
"""Seconds whatever the size, and seconds a byte."""


@dataclass(frozen=True, slots=True)
class Band:
    """How far prices were from measurements that their fit had not seen, as fractions.

    Examples
    --------
    >>> str(Band(0.045, 0.12))
    '4 % off at the median, 12 % at the 90th percentile'
    """

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
    """Seconds of one collective on one number of devices, by the bytes of the whole buffer.

    Examples
    --------
    >>> curve = Curve("all-reduce", 8, ((1e-5, 1e-11), (3e-5, 3e-12)), (512, 1 << 30))
    >>> round(curve.seconds(1 << 20) * 1e6, 1), round(curve.seconds(1 << 24) * 1e6, 1)
    (20.5, 80.3)
    """

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
    """Return the bytes that a device receives per byte of the whole buffer.

    Examples
    --------
    >>> share("all-reduce", 4)
    Fraction(3, 2)
    """
    return Fraction((2 if kind == "all-reduce" else 1) * (devices - 1), devices)


def whole(kind: str, devices: int) -> int:
    """Return the bytes of the whole buffer per byte that a device holds before the step."""
    return devices if kind == "all-gather" else 1


def curve_between(curves: Sequence[Curve], kind: str, devices: int) -> Curve | None:
    """Return the curve of a collective on a number of devices, measured or not.

    Between two numbers that were measured, the seconds for the same whole buffer lie on a straight
    line over the number of devices. Beyond the largest, latency grows as the steps of a ring and
    the rest as the bytes that a device receives, and no error is known.

    Parameters
    ----------
    curves
        What was measured.
    kind, devices
        What is asked for.

    Returns
    -------
    Curve or None
        None where the collective was not measured at all, or only on more devices.

    Examples
    --------
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


# Fitted by benchmarks/links.py to the half-precision nccl-tests tables of ai-
# dynamo/aiconfigurator (Apache-2.0), commit 095f58a, out of place, from 512 bytes to 512 MiB:
# NCCL 2.27.3 for A100, H100 and B200, 2.26.2 for H200, 2.23 for GB200. A row has preset,
# collective, devices; two lines, each with microseconds and picoseconds a byte of the whole
# buffer; and median and 90th percentile of the relative error in percent, below 1 MiB and from
# there on, first of the curve when each size is left out (for H100 and H200 also on the times of
# the other one, which has the same links and another NCCL), then of the price that the numbers of
# devices beside it give.
_FITTED_SIZES: Final = (512, 1 << 29)
_ROWS: Final = """
a100-nvswitch all-gather 2 9.93 11.87 30.57 3.453 11.0,15.0 5.7,15.5 - -
a100-nvswitch all-gather 4 11.84 14.43 43.66 3.987 11.8,18.0 5.3,31.3 5.7,11.7 9.6,28.4
a100-nvswitch all-gather 8 14.48 124.2 21.05 4.965 9.0,17.9 14.1,23.2 - -
a100-nvswitch all-reduce 2 10.53 22.27 36.69 5.3 6.8,15.9 3.7,18.2 - -
a100-nvswitch all-reduce 4 15.04 13.81 55.82 7.021 6.3,11.3 3.9,11.5 6.1,10.4 11.2,14.7
a100-nvswitch all-reduce 8 23.00 13.33 89.21 7.816 7.8,10.5 4.5,7.2 - -
a100-nvswitch all-to-all 2 11.54 11.43 24.71 3.219 7.9,12.5 9.0,22.1 - -
a100-nvswitch all-to-all 4 12.78 11.84 27.11 4.057 3.4,7.1 5.1,9.7 1.9,10.0 7.6,13.1
a100-nvswitch all-to-all 8 13.83 11.66 39.80 4.367 9.1,13.7 2.9,18.7 - -
a100-nvswitch reduce-scatter 2 9.76 10.99 29.01 3.009 9.3,12.6 2.9,11.4 - -
a100-nvswitch reduce-scatter 4 11.47 12.39 39.98 3.737 8.1,12.4 4.7,30.7 8.0,11.1 8.8,22.9
a100-nvswitch reduce-scatter 8 15.51 8.147 58.90 4.094 5.1,9.3 5.9,11.2 - -
b200-nvswitch all-gather 2 8.48 3.504 18.90 1.11 7.5,9.3 1.8,8.1 - -
b200-nvswitch all-gather 4 11.26 3.387 36.61 1.179 5.9,8.3 5.8,15.9 5.4,6.5 6.3,18.4
b200-nvswitch all-gather 8 17.13 3.04 74.54 1.144 3.0,9.7 10.0,28.9 - -
b200-nvswitch all-reduce 2 9.76 4.281 21.59 1.846 5.5,7.9 4.2,14.2 - -
b200-nvswitch all-reduce 4 14.87 5.392 52.13 2.166 4.0,7.2 8.6,20.7 3.8,6.3 6.6,28.3
b200-nvswitch all-reduce 8 26.64 4.72 99.61 2.314 5.4,6.7 9.7,16.8 - -
b200-nvswitch all-to-all 2 8.64 74.32 15.38 1.548 2.3,5.2 4.2,9.1 - -
b200-nvswitch all-to-all 4 9.83 42.14 16.05 1.583 0.6,1.9 4.6,8.5 4.3,4.9 3.7,7.6
b200-nvswitch all-to-all 8 10.88 18 17.79 1.654 6.6,10.5 6.8,10.0 - -
b200-nvswitch reduce-scatter 2 8.43 3.148 16.88 1.202 5.9,8.1 3.1,5.7 - -
b200-nvswitch reduce-scatter 4 11.03 3.536 29.50 1.264 4.9,7.6 7.3,19.1 4.8,6.1 5.2,11.0
b200-nvswitch reduce-scatter 8 16.65 3.344 61.13 1.227 2.9,8.3 10.5,19.6 - -
gb200-nvl72 all-gather 2 9.49 3.097 19.23 1.092 4.8,6.7 2.1,7.3 - -
gb200-nvl72 all-gather 4 12.17 3.114 27.61 1.245 4.1,6.3 9.7,18.3 - -
gb200-nvl72 all-reduce 2 10.84 4.107 22.73 1.815 1.9,2.9 2.7,11.7 - -
gb200-nvl72 all-reduce 4 16.10 4.998 55.39 2.142 1.8,5.7 10.0,21.6 - -
gb200-nvl72 all-to-all 2 9.74 73.95 16.07 1.466 0.8,3.8 3.8,9.0 - -
gb200-nvl72 all-to-all 4 10.57 38.5 16.63 1.526 0.8,1.8 4.0,7.4 - -
gb200-nvl72 reduce-scatter 2 9.43 2.913 16.98 1.198 3.1,5.3 3.0,4.7 - -
gb200-nvl72 reduce-scatter 4 12.14 2.864 25.56 1.296 3.3,5.1 7.5,15.7 - -
h100-nvswitch all-gather 2 5.87 5.19 21.18 2.001 4.7,10.5 2.3,6.4 - -
h100-nvswitch all-gather 4 7.83 5.534 26.41 2.386 7.6,9.8 2.8,11.9 6.4,9.4 9.3,12.5
h100-nvswitch all-gather 8 11.65 5.058 22.37 2.704 10.0,20.1 3.1,8.8 - -
h100-nvswitch all-reduce 2 6.65 8.699 20.02 3.321 4.1,8.3 6.3,13.5 - -
h100-nvswitch all-reduce 4 10.20 7.873 26.49 4.345 4.9,7.4 2.0,4.3 3.1,8.0 9.7,18.1
h100-nvswitch all-reduce 8 16.63 8.101 61.08 3.872 5.7,12.0 4.0,13.1 - -
h100-nvswitch all-to-all 2 6.34 86.85 13.51 1.915 3.0,4.8 9.6,15.0 - -
h100-nvswitch all-to-all 4 6.93 44.28 13.77 2.482 2.7,11.1 9.2,14.1 3.7,6.9 6.4,18.4
h100-nvswitch all-to-all 8 8.41 17.24 13.46 2.997 10.5,26.3 6.1,11.3 - -
h100-nvswitch reduce-scatter 2 6.01 4.533 15.00 2.171 4.8,13.9 3.0,10.0 - -
h100-nvswitch reduce-scatter 4 7.82 4.897 18.30 2.483 5.0,8.3 3.5,12.0 3.8,8.8 5.2,10.2
h100-nvswitch reduce-scatter 8 10.94 3.98 27.68 2.586 4.9,17.4 1.7,9.6 - -
h200-nvswitch all-gather 2 5.67 5.127 20.08 1.985 5.0,9.2 3.0,5.8 - -
h200-nvswitch all-gather 4 7.59 6.088 24.37 2.384 4.9,11.5 2.9,10.3 4.8,7.2 8.0,15.2
h200-nvswitch all-gather 8 10.99 161.1 15.52 2.853 10.5,22.3 8.7,14.6 - -
h200-nvswitch all-reduce 2 6.44 8.529 19.06 3.275 4.7,8.6 4.8,11.7 - -
h200-nvswitch all-reduce 4 10.07 8.156 22.71 4.382 4.0,7.4 2.1,5.2 4.1,7.3 10.0,19.1
h200-nvswitch all-reduce 8 17.98 7.978 62.61 3.75 6.7,14.4 4.7,11.9 - -
h200-nvswitch all-to-all 2 6.51 78.05 12.67 1.802 2.8,7.2 6.1,14.8 - -
h200-nvswitch all-to-all 4 6.85 41.94 12.31 2.475 4.1,9.5 8.2,15.1 14.5,68.7 6.1,20.4
h200-nvswitch all-to-all 8 9.59 17.76 14.01 2.943 7.1,20.8 6.7,11.1 - -
h200-nvswitch reduce-scatter 2 5.57 4.765 14.45 2.141 6.5,11.4 2.9,8.3 - -
h200-nvswitch reduce-scatter 4 7.36 5.309 18.43 2.449 3.9,8.2 3.2,9.8 3.4,6.3 6.3,11.1
h200-nvswitch reduce-scatter 8 11.87 4.576 24.00 2.604 9.6,13.0 2.2,5.9 - -
"""


@lru_cache(maxsize=32)
def curves_of(preset: str) -> tuple[Curve, ...]:
    """Return the curves of a preset; none where nothing was fitted.

    Examples
    --------
    >>> [c.devices for c in curves_of("gb200-nvl72") if c.kind == "all-reduce"]
    [2, 4]
    """
    rows = (row.split() for row in _ROWS.strip().splitlines())
    return tuple(
        Curve(
            kind,
            int(devices),
            (_line(*numbers[:2]), _line(*numbers[2:4])),
            _FITTED_SIZES,
            (_band(numbers[4]), _band(numbers[5])),
            (_band(numbers[6]), _band(numbers[7])),
        )
        for name, kind, devices, *numbers in rows
        if name == preset
    )


def _line(microseconds: str, picoseconds: str) -> Line:
    return float(microseconds) / 1e6, float(picoseconds) / 1e12


def _band(text: str) -> Band | None:
    return None if text == "-" else Band(*(float(part) / 100 for part in text.split(",")))


def copies(step: Step, devices: int) -> int:
    """Return how often a device copies what it holds before a collective, to pack and unpack.

    Parameters
    ----------
    step, devices
        A collective, and along how many devices it goes.

    Examples
    --------
    >>> copies(AllGather(0, (1,)), 4), copies(AllGather(1, (1,)), 4)
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
    """Return which of `KINDS` a step is; None for one that is no collective.

    Examples
    --------
    >>> kind_of(AllGather(0, (1,)))
    'all-gather'
    """
    return _COLLECTIVES.get(type(step))


def bytes_received(step: Step, mesh_shape: Sequence[int], num_bytes: int) -> int:
    """Return the bytes that a device receives in a step, by a bandwidth-optimal algorithm.

    Parameters
    ----------
    step
        What moves; no permute or exchange, which are counted from the layouts on both sides.
    mesh_shape
        Devices along each axis.
    num_bytes
        Bytes of the largest shard before the step.

    Examples
    --------
    >>> bytes_received(AllGather(0, (1,)), (2, 4), 100)
    300
    >>> bytes_received(AllReduce((1,), "sum"), (2, 4), 100)
    150
    """
    assert not isinstance(step, Permute | Exchange), "counted from the layouts on both sides"
    n, kind = prod(mesh_shape[axis] for axis in step.axes), kind_of(step)
    return 0 if kind is None else ceil(num_bytes * share(kind, n) * whole(kind, n))
