"""From measured times of one collective to its curve, and how far such a curve can be trusted.

A curve is the lower of two lines, for a protocol of low latency and one of high bandwidth. For
every size at which the one may give way to the other, both lines are fitted and each measurement
goes to the line that is lower there, a few times over; the best of these fits is kept. What is made
small is the relative error, since a microsecond counts for as much in a short step as a
millisecond in a long one, and measurements far off count for less (iteratively reweighted least
squares, Huber's weights).

How far prices are off is found by cross-validation: each size is left out once and priced by the
fit of the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.curves import LARGE, Band, Curve, Line, curve_between

__all__ = ["Times", "bands", "fit_curve", "fit_curves", "fit_lines", "line_of"]

Floats: TypeAlias = npt.NDArray[np.float64]
Times: TypeAlias = Sequence[tuple[float, float]]
"""Bytes of the whole buffer and seconds; sizes ascend."""

_ROUNDS: Final = 8
_TRUSTED: Final = 0.2
"""A relative error up to which a measurement counts in full."""
_FEWEST: Final = 6
"""Measurements from which on there are two lines."""


def line_of(x: Floats, y: Floats, seconds: Floats) -> Line:
    """Return the factors of `x` and `y`, neither negative, whose sum is nearest to the seconds."""
    x, y = x / seconds, y / seconds
    weights = np.ones(len(seconds))
    best = (0.0, 0.0)
    for _ in range(_ROUNDS):
        best = _nonnegative(x * weights, y * weights, weights)
        errors = np.abs(best[0] * x + best[1] * y - 1)
        weights = np.sqrt(np.minimum(1.0, _TRUSTED / np.maximum(errors, 1e-12)))
    return best


def _nonnegative(x: Floats, y: Floats, right: Floats) -> Line:
    """Least squares of two unknowns that are not negative: inside, or on one of two edges."""
    xx, xy, yy, xr, yr = (float(v) for v in (x @ x, x @ y, y @ y, x @ right, y @ right))
    det = xx * yy - xy * xy
    if det > 1e-12 * xx * yy:
        inside = ((xr * yy - yr * xy) / det, (yr * xx - xr * xy) / det)
        if min(inside) >= 0:
            return inside
    # What an edge explains of the right side.
    first, second = (xr * xr / xx if xx else 0.0), (yr * yr / yy if yy else 0.0)
    return (xr / xx, 0.0) if first >= second else (0.0, yr / yy)


def fit_lines(times: Times) -> tuple[Line, ...]:
    """Return the lines of which the lowest is nearest to measured times.

    Examples
    --------
    >>> sizes = [1 << k for k in range(10, 28)]
    >>> lines = fit_lines([(b, min(1e-5 + 1e-10 * b, 5e-5 + 1e-11 * b)) for b in sizes])
    >>> [(f"{fixed:.1e}", f"{slope:.1e}") for fixed, slope in lines]
    [('1.0e-05', '1.0e-10'), ('5.0e-05', '1.0e-11')]
    """
    size, seconds = np.array(times, dtype=np.float64).T
    ones = np.ones(len(size))
    best: tuple[Line, ...] = (line_of(ones, size, seconds),)
    least = _distance(best, size, seconds)
    for first in range(2, len(size) - 1) if len(size) >= _FEWEST else ():
        low = np.arange(len(size)) < first
        for _ in range(4):
            if not 2 <= low.sum() <= len(size) - 2:
                break
            lines = tuple(line_of(ones[p], size[p], seconds[p]) for p in (low, ~low))
            distance = _distance(lines, size, seconds)
            if distance < least:
                best, least = lines, distance
            (a, b), (c, d) = lines
            again = a + b * size <= c + d * size
            if (again == low).all():
                break
            low = again
    return tuple(sorted(best))


def _distance(lines: Sequence[Line], size: Floats, seconds: Floats) -> float:
    predicted = np.min([fixed + slope * size for fixed, slope in lines], axis=0)
    return float(np.minimum(np.abs(np.log(np.maximum(predicted, 1e-12) / seconds)), 1.0).mean())


def bands(pairs: Iterable[tuple[float, float]]) -> tuple[Band | None, Band | None]:
    """Return the errors below `LARGE` and from there on, of pairs of bytes and relative error."""
    errors: tuple[list[float], list[float]] = ([], [])
    for size, error in pairs:
        errors[size >= LARGE].append(error)
    found = [Band(*map(float, np.quantile(each, (0.5, 0.9)))) if each else None for each in errors]
    return found[0], found[1]


def fit_curve(kind: str, devices: int, times: Times, other: Times = ()) -> Curve:
    """Return the curve of measured times.

    Parameters
    ----------
    kind, devices
        What was measured.
    times
        At least two sizes.
    other
        Times of the same that are not fitted but count in the errors: of another version of the
        communication library, say.
    """
    lines = fit_lines(times)
    curve = Curve(kind, devices, lines, (int(times[0][0]), int(times[-1][0])))
    errors = [(size, abs(curve.seconds(size) / seconds - 1)) for size, seconds in other]
    for place, (size, seconds) in enumerate(times) if len(times) > 2 else ():
        rest = [*times[:place], *times[place + 1 :]]
        left = replace(curve, lines=fit_lines(rest))
        errors.append((size, abs(left.seconds(size) / seconds - 1)))
    return replace(curve, errors=bands(errors))


def fit_curves(
    measured: Mapping[tuple[str, int], Times], other: Mapping[tuple[str, int], Times] | None = None
) -> tuple[Curve, ...]:
    """Return the curves of times by collective and number of devices.

    Each number of devices between two others is also left out once, and priced from these.
    """
    fitted = [
        fit_curve(kind, devices, times, (other or {}).get((kind, devices), ()))
        for (kind, devices), times in measured.items()
    ]
    curves = []
    for curve in fitted:
        rest = [each for each in fitted if each is not curve]
        numbers = [each.devices for each in rest if each.kind == curve.kind]
        if numbers and min(numbers) < curve.devices < max(numbers):
            guess = curve_between(rest, curve.kind, curve.devices)
            assert guess is not None, "there is one on either side"
            times = measured[curve.kind, curve.devices]
            off = ((size, abs(guess.seconds(size) / seconds - 1)) for size, seconds in times)
            curve = replace(curve, left_out=bands(off))
        curves.append(curve)
    return tuple(curves)
