"""From measured times of steps to the latency and the rate of every mesh axis.

These price permute and exchange, and steps along axes that were not measured together; the
collectives that were measured have curves, see `shardspec.profiling.curves`. The model is that of
`shardspec.comm.cost`, whose own lines make the equations, so that a fit and a price cannot
disagree: a step along one axis takes ``messages * alpha + bytes * beta``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean, median

import numpy as np

from shardspec.comm.cost import CostModel, Link
from shardspec.comm.curves import KINDS, Curve, Line, whole
from shardspec.comm.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Step
from shardspec.errors import ProfileError
from shardspec.mesh import LinkModel
from shardspec.profiling.curves import fit_curve, line_of

__all__ = ["Fit", "Measurement", "curves_of_groups", "fit_links", "step_of"]


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

    def cost_model(self, mesh_shape: tuple[int, ...]) -> CostModel:
        """Return the model with these links."""
        return CostModel(mesh_shape, self.links, self.link_model)


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
        messages, shares = np.array([_equation(unit, m) for m in own]).T
        seconds = np.array([m.seconds for m in own])
        links.append(Link(*line_of(messages, shares, seconds), "measured"))
    model = CostModel(mesh_shape, tuple(links), link_model)
    errors = [abs(_predicted(model, m) / m.seconds - 1) for m in measurements]
    mean = fmean(min(error, 1.0) for error in errors)
    return Fit(link_model, tuple(links), median(errors), max(errors), mean)


def curves_of_groups(
    mesh_shape: tuple[int, ...], measurements: Sequence[Measurement]
) -> tuple[tuple[tuple[int, ...], tuple[Curve, ...]], ...]:
    """Return the curves of every collective along every group of axes that was measured.

    A collective that was measured at one size alone has none.
    """
    times: dict[tuple[int, ...], dict[str, list[tuple[float, float]]]] = {}
    for m in measurements:
        held = whole(m.kind, prod(mesh_shape[axis] for axis in m.axes))
        of_kind = times.setdefault(tuple(sorted(m.axes)), {}).setdefault(m.kind, [])
        of_kind.append((float(m.num_bytes * held), m.seconds))
    return tuple(
        (
            axes,
            tuple(
                fit_curve(kind, prod(mesh_shape[axis] for axis in axes), sorted(found))
                for kind, found in kinds.items()
                if len({size for size, _ in found}) > 1
            ),
        )
        for axes, kinds in times.items()
    )


def _predicted(model: CostModel, measured: Measurement) -> float:
    return model.step_seconds(step_of(measured.kind, measured.axes), measured.num_bytes)


def _equation(unit: CostModel, measured: Measurement) -> Line:
    """Return how often a measurement pays alpha, and for how many bytes beta."""
    ((messages, share),) = unit.lines(step_of(measured.kind, measured.axes))
    return messages, share * measured.num_bytes
