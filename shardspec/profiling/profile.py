"""A profile of a cluster: measured times and fits, with tables and a file format."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Final

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import Line
from shardspec.comm.profile_file import PROFILE_FORMAT, PROFILE_VERSION, floored
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.profiling.fit import Fit, Measurement, curves_of_groups, fit_links, fitted
from shardspec.text import seconds_text, table_text

_LEAST_GAIN: Final = 1e-6
"""How much better a bus must fit; along a single axis both models agree up to rounding."""


@dataclass(frozen=True)
class Profile:
    """The measurements on a mesh, from which the fits are derived."""

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None
    measurements: tuple[Measurement, ...]
    facts: Mapping[str, str]
    """Where and when: backend, device, ranks, date and the like, by name."""

    @cached_property
    def ring(self) -> Fit:
        """The fit of dedicated links for each group."""
        return fit_links(self.mesh_shape, self.measurements, "ring")

    @cached_property
    def shared_bus(self) -> Fit:
        """The fit of a bus that all devices share."""
        return fit_links(self.mesh_shape, self.measurements, "shared-bus")

    @property
    def fit(self) -> Fit:
        """The better fit."""
        bus_is_nearer = self.shared_bus.mean_error < self.ring.mean_error - _LEAST_GAIN
        return self.shared_bus if bus_is_nearer else self.ring

    @cached_property
    def cost_model(self) -> CostModel:
        """The curves of collectives, with the better fit for steps without a curve."""
        curves = curves_of_groups(self.mesh_shape, self.measurements)
        model = self.fit.model
        mesh = DeviceMesh(
            range(prod(self.mesh_shape)), self.mesh_shape, link_model=model.link_model
        )
        return replace(model, links=floored(model.links, mesh, curves), measured=curves)

    def table(self) -> str:
        """Return the curves, and the links with the errors of each model, as text tables."""
        labels = self.axis_names or tuple(map(str, range(len(self.mesh_shape))))
        curves = [
            [
                curve.kind,
                ",".join(labels[axis] for axis in axes),
                str(curve.devices),
                *map(_line_text, (curve.lines[0], curve.lines[-1])),
                *(f"{band.median:.0%}, {band.most:.0%}" if band else "" for band in curve.errors),
            ]
            for axes, group in self.cost_model.measured
            for curve in group
        ]
        links = [
            [
                f"{fit.model.link_model}{' (chosen)' if fit is self.fit else ''}",
                label,
                str(devices),
                seconds_text(link.latency_s),
                _rate_text(link.seconds_per_byte),
                f"{fit.typical_error:.1%}",
                f"{fit.worst_error:.1%}",
            ]
            for fit in (self.ring, self.shared_bus)
            for label, devices, link in zip(labels, self.mesh_shape, fit.model.links, strict=True)
        ]
        kind = ["collective", "axes", "devices"]
        of_curves = [*kind, "low latency", "high rate", "error", "from 1 MiB"]
        of_links = ["model", "axis", "devices", "latency", "rate", "typical error", "worst"]
        tables = (of_curves, curves), (of_links, links)
        return "\n\nelsewhere:\n".join(table_text(*table, numbers_from=2) for table in tables)

    def to_json(self) -> str:
        """Return the profile as JSON text; `CostModel.from_profile` reads the fits of such a file.

        The measurements, each with its modeled time, are for human readers.
        """
        model = self.cost_model
        record = {
            "format": PROFILE_FORMAT,
            "version": PROFILE_VERSION,
            "mesh_shape": self.mesh_shape,
            "axis_names": self.axis_names,
            "link_model": model.link_model,
            "fits": {fit.model.link_model: fit.as_dict() for fit in (self.ring, self.shared_bus)},
            "curves": [
                {"axes": axes, **curve.as_dict()}
                for axes, group in model.measured
                for curve in group
            ],
            "known_error": model.known_error,
            "facts": dict(self.facts),
            "measurements": [
                {**asdict(m), "fitted_seconds": fitted(model, m)} for m in self.measurements
            ],
        }
        return json.dumps(record, indent=1)


def _line_text(line: Line) -> str:
    return f"{seconds_text(line[0])} + {_rate_text(line[1])}"


def _rate_text(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.4g} GB/s" if seconds_per_byte else "free"
