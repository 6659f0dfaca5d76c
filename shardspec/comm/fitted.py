"""Curves of collectives on one node, fitted to published times.

Fitted by benchmarks/links.py to the half-precision nccl-tests tables of ai-dynamo/aiconfigurator
(Apache-2.0), commit 095f58a, out of place, from 512 bytes to 512 MiB: NCCL 2.27.3 for A100, H100
and B200, 2.26.2 for H200, 2.23 for GB200. A row has preset, collective, devices; two lines, each
with microseconds and picoseconds a byte of the whole buffer; and median and 90th percentile of the
relative error in percent, below 1 MiB and from there on, first of the curve when each size is left
out (for H100 and H200 also on the times of the other one, which has the same links and another
NCCL), then of the price that the numbers of devices beside it give.
"""

from functools import lru_cache
from typing import Final

from shardspec.comm.curves import Band, Curve, Line

__all__ = ["curves_of"]

_SIZES: Final = (512, 1 << 29)

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
            _SIZES,
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
