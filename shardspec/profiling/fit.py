"""Fits curves of collectives, and links of mesh axes, to measured times of steps.

A curve is the minimum of two lines, for a protocol of low latency and one of high bandwidth, which
meet at the size that fits best. The fit minimizes relative errors, with Huber's weights for
outliers (iteratively reweighted least squares). Each size is left out once and priced by the fit of
the others, which yields the errors.

Links price steps that were not measured. They are fitted to the lines of `shardspec.comm.cost`, so
that fits and prices agree.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import fmean, median
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import LARGE, Band, Curve, Errors, Line, Link, Measured, whole
from shardspec.comm.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Step
from shardspec.errors import ProfileError
from shardspec.mesh.device_mesh import LinkModel

Floats: TypeAlias = npt.NDArray[np.float64]
Times: TypeAlias = Sequence[tuple[float, float]]
"""Pairs of the whole buffer's bytes and seconds, by ascending size."""

_ROUNDS: Final = 8
_TRUSTED: Final = 0.2
"""The relative error up to which a measurement has full weight."""
_FEWEST: Final = 6
"""The fewest measurements for a curve of two lines."""


def _line_of(x: Floats, y: Floats, seconds: Floats) -> Line:
    """Return the nonnegative factors of `x` and `y` whose weighted sum fits the seconds best."""
    x, y = x / seconds, y / seconds
    weights = np.ones(len(seconds))
    best = (0.0, 0.0)
    for _ in range(_ROUNDS):
        best = _nonnegative(x * weights, y * weights, weights)
        errors = np.abs(best[0] * x + best[1] * y - 1)
        weights = np.sqrt(np.minimum(1.0, _TRUSTED / np.maximum(errors, 1e-12)))
    return best


def _nonnegative(x: Floats, y: Floats, right: Floats) -> Line:
    """Return the least-squares solution for two nonnegative unknowns.

    It is in the interior or on one of the two edges.
    """
    (a, b), *_ = np.linalg.lstsq(np.stack([x, y], axis=1), right)
    if a >= 0 and b >= 0:
        return float(a), float(b)
    edges = [(float(x @ right / (x @ x)), 0.0), (0.0, float(y @ right / (y @ y)))]
    return min(edges, key=lambda edge: np.linalg.norm(edge[0] * x + edge[1] * y - right))


def candidate_lines(times: Times) -> list[tuple[float, tuple[Line, ...]]]:
    """Return candidate curves, as distance to the measured times and lines, nearest first."""
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


def bands(pairs: Iterable[tuple[float, float]]) -> Errors:
    """Return the errors below `LARGE` and from `LARGE` on, given pairs of bytes and error."""
    errors: tuple[list[float], list[float]] = ([], [])
    for size, error in pairs:
        errors[size >= LARGE].append(error)
    by_size = [
        Band(*map(float, np.quantile(each, (0.5, 0.9)))) if each else None for each in errors
    ]
    return by_size[0], by_size[1]


def fit_curve(
    kind: str,
    devices: int,
    times: Times,
    other: Times = (),
    accepts: Callable[[Curve], bool] = lambda _: True,
    nodes: int = 1,
) -> Curve:
    """Return the best curve for times at two or more sizes that `accepts`, or else the best one.

    `other` times count only in the errors.
    """

    def fit(subset: Times) -> Curve:
        sizes = int(times[0][0]), int(times[-1][0])
        found = (lines for _, lines in candidate_lines(subset))
        near = [Curve(kind, devices, lines, sizes, nodes=nodes) for lines in found]
        return next(filter(accepts, near), near[0])

    curve = fit(times)
    errors = [(size, abs(curve.seconds(size) / seconds - 1)) for size, seconds in other]
    for place, (size, seconds) in enumerate(times) if len(times) > 2 else ():
        without = fit([*times[:place], *times[place + 1 :]])
        errors.append((size, abs(without.seconds(size) / seconds - 1)))
    return replace(curve, errors=bands(errors))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured duration of one step."""

    kind: str
    axes: tuple[int, ...]
    num_bytes: int
    """Bytes of the largest shard before the step."""
    seconds: float
    """Median over repetitions of the slowest rank's time; above 0."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Links fitted to measurements under one link model, with the errors of the fit."""

    model: CostModel
    typical_error: float
    """Median of the relative errors of all measurements."""
    worst_error: float
    mean_error: float
    """Mean of the errors, each at most 1, by which link models are compared."""

    def as_dict(self) -> dict[str, object]:
        """Return plain values, ready for JSON."""
        keys = ("latency_s", "seconds_per_byte")
        links = [{key: getattr(link, key) for key in keys} for link in self.model.links]
        errors = {key: getattr(self, key) for key in self.__slots__ if key != "model"}
        return {"links": links, **errors}


def step_of(kind: str, axes: tuple[int, ...]) -> Step:
    """Return the step for one of `KINDS`, on a tensor of two dims."""
    steps: dict[str, Step] = {
        "all-gather": AllGather(0, axes),
        "reduce-scatter": ReduceScatter(0, axes, "sum"),
        "all-reduce": AllReduce(axes, "sum"),
        "all-to-all": AllToAll(0, 1, axes, axes),
    }
    return steps[kind]


def fitted(model: CostModel, measured: Measurement) -> float:
    """Return the modeled seconds of a measured step."""
    return model.step_seconds(step_of(measured.kind, measured.axes), measured.num_bytes)


def fit_links(
    mesh_shape: tuple[int, ...], measurements: Sequence[Measurement], link_model: LinkModel
) -> Fit:
    """Return the links that fit best; each axis is fitted to the steps along that axis alone."""
    unit = CostModel(mesh_shape, (Link(1.0, 1.0),) * len(mesh_shape), link_model)
    links = []
    for axis, devices in enumerate(mesh_shape):
        own = [m for m in measurements if m.axes == (axis,)]
        if devices == 1:
            links.append(Link(0.0, 0.0, "measured"))
            continue
        if len({m.num_bytes for m in own}) < 2:
            raise ProfileError(
                f"axis {axis} has {len(own)} measurements; two sizes of a step at least are needed"
            )
        # The factors of alpha and beta in each step's price.
        lines = [(unit.lines(step_of(m.kind, m.axes))[0], m.num_bytes) for m in own]
        messages, shares = np.array([(often, share * size) for (often, share), size in lines]).T
        seconds = np.array([m.seconds for m in own])
        links.append(Link(*_line_of(messages, shares, seconds), "measured"))
    model = CostModel(mesh_shape, tuple(links), link_model)
    errors = [abs(fitted(model, m) / m.seconds - 1) for m in measurements]
    return Fit(model, median(errors), max(errors), fmean(min(error, 1.0) for error in errors))


def curves_of_groups(mesh_shape: tuple[int, ...], measurements: Sequence[Measurement]) -> Measured:
    """Return the curves of every collective along every group of axes, measured at two sizes."""
    times: dict[tuple[int, ...], dict[str, list[tuple[float, float]]]] = {}
    for m in measurements:
        factor = whole(m.kind, prod(mesh_shape[axis] for axis in m.axes))
        of_kind = times.setdefault(tuple(sorted(m.axes)), {}).setdefault(m.kind, [])
        of_kind.append((float(m.num_bytes * factor), m.seconds))
    curves = []
    for axes, kinds in times.items():
        devices = prod(mesh_shape[axis] for axis in axes)
        several = ((k, sorted(points)) for k, points in kinds.items() if len(dict(points)) > 1)
        curves.append((axes, tuple(fit_curve(kind, devices, points) for kind, points in several)))
    return tuple(curves)
