"""A profile of a cluster: measured times, the links that fit them, and the file they are in."""

import json
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isclose, prod
from pathlib import Path
from typing import Any, Final

from shardspec.checkpoint.commit import write_atomically
from shardspec.checkpoint.strict_json import checked, field, parse_json
from shardspec.comm.cost import CostModel
from shardspec.comm.curves import KINDS, Line
from shardspec.errors import CheckpointError, InputFileError, MeshError, ProfileError
from shardspec.input_files import read_input_file
from shardspec.mesh import DeviceMesh
from shardspec.profiling.fit import Fit, Measurement, curves_of_groups, fit_links, fitted
from shardspec.text import seconds_text, table_text

_FORMAT: Final = "shardspec profile"
_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20
_ALIKE: Final = 1e-6
_MOST_DEVICES: Final = 2**20
_SECONDS: Final = (1e-9, 1e6)
"""No step takes less or more; what is read must not overflow in a fit either."""


@dataclass(frozen=True)
class Profile:
    """What was measured on a mesh; the rest follows from the measurements."""

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None
    measurements: tuple[Measurement, ...]
    facts: Mapping[str, str]
    """Where and when: backend, device, ranks, date and the like, by name."""

    @cached_property
    def ring(self) -> Fit:
        """The fit of links that each group has for itself."""
        return fit_links(self.mesh_shape, self.measurements, "ring")

    @cached_property
    def shared_bus(self) -> Fit:
        """The fit of a bus that all devices share."""
        return fit_links(self.mesh_shape, self.measurements, "shared-bus")

    @property
    def fit(self) -> Fit:
        """The better fit; along one axis alone both say the same, and it is the ring."""
        bus_is_nearer = self.shared_bus.mean_error < self.ring.mean_error - _ALIKE
        return self.shared_bus if bus_is_nearer else self.ring

    @cached_property
    def cost_model(self) -> CostModel:
        """The curves of collectives, and the better fit for what has none."""
        curves = curves_of_groups(self.mesh_shape, self.measurements)
        return replace(self.fit.cost_model(self.mesh_shape), measured=curves)

    def table(self) -> str:
        """Return the curves, and the links with how well each model fits, as text."""
        labels = self.axis_names or tuple(map(str, range(len(self.mesh_shape))))
        curves = [
            [
                curve.kind,
                ",".join(labels[axis] for axis in axes),
                str(curve.devices),
                *map(_line_text, (curve.lines[0], curve.lines[-1])),
                *(f"{band.median:.0%}, {band.most:.0%}" if band else "" for band in curve.errors),
            ]
            for axes, some in self.cost_model.measured
            for curve in some
        ]
        header = [
            "collective",
            "axes",
            "devices",
            "low latency",
            "high rate",
            "error",
            "from 1 MiB",
        ]
        links = [
            [
                f"{fit.link_model}{' (chosen)' if fit is self.fit else ''}",
                label,
                str(devices),
                seconds_text(link.latency_s),
                _rate_text(link.seconds_per_byte),
                f"{fit.typical_error:.1%}",
                f"{fit.worst_error:.1%}",
            ]
            for fit in (self.ring, self.shared_bus)
            for label, devices, link in zip(labels, self.mesh_shape, fit.links, strict=True)
        ]
        titles = ["model", "axis", "devices", "latency", "rate", "typical error", "worst"]
        tables = [(header, curves), (titles, links)]
        return "\n\nelsewhere:\n".join(table_text(*table, numbers_from=2) for table in tables)

    def to_json(self) -> str:
        """Return the profile as the text of its file."""
        model = self.cost_model
        record = {
            "format": _FORMAT,
            "version": _VERSION,
            "mesh_shape": self.mesh_shape,
            "axis_names": self.axis_names,
            **self._derived(),
            "known_error": model.known_error,
            "facts": dict(self.facts),
            "measurements": [
                {**asdict(m), "fitted_seconds": fitted(model, m)} for m in self.measurements
            ],
        }
        return json.dumps(record, indent=1)

    def _derived(self) -> dict[str, Any]:
        """Return what follows from the measurements, and is checked when the file is read."""
        fits = {
            fit.link_model: {
                "links": [
                    {"latency_s": link.latency_s, "seconds_per_byte": link.seconds_per_byte}
                    for link in fit.links
                ],
                "typical_error": fit.typical_error,
                "worst_error": fit.worst_error,
                "mean_error": fit.mean_error,
            }
            for fit in (self.ring, self.shared_bus)
        }
        return {"link_model": self.fit.link_model, "fits": fits}

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the profile; the file appears when it is complete."""
        content = self.to_json().encode()

        def fill(fd: int) -> None:
            os.pwrite(fd, content, 0)

        write_atomically(Path(path), len(content), fill, overwrite=overwrite)

    @classmethod
    def load(cls, path: Path | str) -> "Profile":
        """Read a profile that `save` wrote; `ProfileError` if it is none, or damaged."""
        try:
            return _read(Path(path))
        except (CheckpointError, InputFileError, MeshError, ProfileError) as error:
            said = str(error)
            raise ProfileError(said if said.startswith(str(path)) else f"{path}: {said}") from None


def _line_text(line: Line) -> str:
    return f"{seconds_text(line[0])} + {_rate_text(line[1])}"


def _rate_text(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.4g} GB/s" if seconds_per_byte else "free"


def _read(path: Path) -> Profile:
    if not os.path.isfile(path):
        raise ProfileError("there is no such file; 'shardspec profile' makes one")
    data = read_input_file(path, _MOST_BYTES)
    root = checked(parse_json(data, path, "profile"), dict, path, "the profile")
    if root.get("format") != _FORMAT:
        raise ProfileError("is not a profile; 'shardspec profile' makes one")
    version = field(root, "version", int, path, "")
    if version != _VERSION:
        raise ProfileError(
            f"is of version {version}, but this reads version {_VERSION}; measure again or update"
        )
    shape = field(root, "mesh_shape", tuple, path, "")
    if not 0 < prod(shape) <= _MOST_DEVICES:
        raise ProfileError(f"mesh_shape {list(shape)} is not a mesh")
    names = None
    if root.get("axis_names") is not None:
        names = tuple(field(root, "axis_names", list, path, ""))
    mesh = DeviceMesh(range(prod(shape)), shape, axis_names=names)
    facts = {
        name: checked(fact, str, path, name)
        for name, fact in field(root, "facts", dict, path, "").items()
    }
    measurements = [
        _measurement(item, path, f"measurements[{number}]", shape)
        for number, item in enumerate(field(root, "measurements", list, path, ""))
    ]
    profile = Profile(shape, mesh.axis_names, tuple(measurements), facts)
    field(root, "fits", dict, path, "")
    _check_alike(root, profile._derived(), "")
    return profile


def _check_alike(found: Any, expected: Any, key: str) -> None:  # noqa: ANN401  # parsed JSON
    """Compare what a file says with what follows, but for the rounding of another machine."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name, value in expected.items():
            _check_alike(found.get(name), value, f"{key}.{name}" if key else name)
        return
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for number, value in enumerate(expected):
            _check_alike(found[number], value, f"{key}[{number}]")
        return
    same = found == expected
    if isinstance(expected, float) and isinstance(found, float):
        same = isclose(found, expected, rel_tol=_ALIKE, abs_tol=1e-15)
    if not same:
        raise ProfileError(
            f"{key} is {found!r:.60}, which does not follow from the measurements; by these it is "
            f"{expected!r:.60}. The file was changed, measure again"
        )


def _measurement(value: object, path: Path, key: str, mesh_shape: Sequence[int]) -> Measurement:
    item = checked(value, dict, path, key)
    kind = field(item, "kind", str, path, key)
    axes = field(item, "axes", tuple, path, key)
    num_bytes = field(item, "num_bytes", int, path, key)
    seconds: Any = field(item, "seconds", object, path, key)
    (least, most), dims = _SECONDS, len(mesh_shape)
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    for name, fine, due in (
        ("kind", kind in KINDS, f"one of {', '.join(KINDS)}"),
        ("axes", axes and len({*axes}) == len(axes) and max(axes) < dims, "axes of the mesh"),
        ("num_bytes", num_bytes > 0, "above 0"),
        ("seconds", number and least <= seconds <= most, f"a number from {least:g} to {most:g}"),
    ):
        if not fine:
            raise ProfileError(f"{key}.{name} is {item[name]!r:.24}, but should be {due}")
    return Measurement(kind, axes, num_bytes, float(seconds))
