"""From measured times of steps to the latency and the rate of every mesh axis.

The model is that of `shardspec.comm.cost`, whose own coefficients make the equations, so that a
fit and a price cannot disagree: a step along one axis takes ``messages * alpha + bytes * beta``.
What is made small is the relative error, since a microsecond counts for as much in a short step as
a millisecond in a long one; measurements far off count for less (iteratively reweighted least
squares, Huber's weights).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

import numpy as np
import numpy.typing as npt

from shardspec.comm.cost import CostModel, Link
from shardspec.comm.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Step
from shardspec.errors import ProfileError
from shardspec.mesh import LinkModel

__all__ = ["KINDS", "Fit", "Measurement", "fit_links", "step_of"]

Floats = npt.NDArray[np.float64]

KINDS: Final = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
"""What is measured."""

_ROUNDS: Final = 20
_TRUSTED: Final = 0.2
"""A relative error up to which a measurement counts in full."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long one step took."""

    kind: str
    """One of `KINDS`."""
    axes: tuple[int, ...]
    """Mesh axes along which data moved."""
    num_bytes: int
    """Bytes of the largest shard before the step."""
    seconds: float
    """Median over repetitions of the slowest rank's time; above 0."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Links that fit measurements under one model, and how well."""

    link_model: LinkModel
    links: tuple[Link, ...]
    """One per axis."""
    typical_error: float
    """Median of the relative errors of all measurements."""
    worst_error: float
    mean_error: float
    """Mean of the errors, each counted as 1 at most: what models are compared by."""

    def cost_model(self, mesh_shape: tuple[int, ...], known_error: str = "") -> CostModel:
        """Return the model with these links."""
        return CostModel(mesh_shape, self.links, self.link_model, known_error)


def step_of(kind: str, axes: tuple[int, ...]) -> Step:
    """Return the step that a kind stands for, on a tensor of two dims.

    Examples
    --------
    >>> step_of("all-gather", (1,))
    AllGather(dim=0, axes=(1,))
    """
    match kind:
        case "all-gather":
            return AllGather(0, axes)
        case "reduce-scatter":
            return ReduceScatter(0, axes, "sum")
        case "all-reduce":
            return AllReduce(axes, "sum")
        case "all-to-all":
            return AllToAll(0, 1, axes, axes)
    raise ProfileError(f"{kind!r} is no kind of step that is measured; use one of {KINDS}")


def fit_links(
    mesh_shape: tuple[int, ...], measurements: Sequence[Measurement], link_model: LinkModel
) -> Fit:
    """Return the links that fit measurements best.

    Each axis is fitted to the steps along it alone. Steps along several axes do not take part, but
    count in the errors.

    Parameters
    ----------
    mesh_shape
        Devices along each axis.
    measurements
        At least two sizes of some step along every axis of two devices or more.
    link_model
        The formulas to fit.

    Raises
    ------
    ProfileError
        If an axis has too few measurements.

    Examples
    --------
    >>> sizes = (4096, 65536, 1 << 20)
    >>> times = [Measurement("all-gather", (0,), b, 1e-5 + 3e-10 * b) for b in sizes]
    >>> fit = fit_links((2,), times, "ring")
    >>> str(fit.links[0]), round(fit.worst_error, 6)
    ('measured: 10 µs, 3.333 GB/s', 0.0)
    """
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
        equations = np.array([_equation(unit, m) for m in own])
        seconds = np.array([m.seconds for m in own])
        links.append(Link(*_solve(equations, seconds), "measured"))
    model = CostModel(mesh_shape, tuple(links), link_model)
    errors = [abs(_predicted(model, m) / m.seconds - 1) for m in measurements]
    mean = fmean(min(error, 1.0) for error in errors)
    return Fit(link_model, tuple(links), median(errors), max(errors), mean)


def _predicted(model: CostModel, measured: Measurement) -> float:
    return model.step_seconds(step_of(measured.kind, measured.axes), measured.num_bytes)


def _equation(unit: CostModel, measured: Measurement) -> tuple[float, float]:
    """Return how often a measurement pays alpha, and for how many bytes beta."""
    messages, share = unit.coefficients(step_of(measured.kind, measured.axes))
    return messages, share * measured.num_bytes


def _solve(equations: Floats, seconds: Floats) -> tuple[float, float]:
    """Return alpha and beta, neither negative."""
    relative = equations / seconds[:, None]
    weights = np.ones(len(seconds))
    best = np.zeros(2)
    for _ in range(_ROUNDS):
        best = _nonnegative(relative * weights[:, None], weights)
        errors = np.abs(relative @ best - 1)
        weights = np.sqrt(np.minimum(1.0, _TRUSTED / np.maximum(errors, 1e-12)))
    return float(best[0]), float(best[1])


def _nonnegative(matrix: Floats, right: Floats) -> Floats:
    """Least squares of two unknowns that are not negative: inside, or on one of two edges."""
    solution = np.linalg.lstsq(matrix, right, rcond=None)[0]
    if (solution >= 0).all():
        return np.asarray(solution, dtype=np.float64)
    edges = []
    for column in range(2):
        own = matrix[:, column]
        edge = np.zeros(2)
        edge[column] = max(0.0, float(own @ right) / float(own @ own))
        edges.append(edge)
    return min(edges, key=lambda edge: float(np.square(matrix @ edge - right).sum()))
