"""A profile of a cluster: measured times, the links that fit them, and the file they lie in."""

import json
import os.path
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isclose, prod
from pathlib import Path
from typing import Final

from shardspec.checkpoint.commit import write_atomically
from shardspec.checkpoint.strict_json import checked, field, parse_json
from shardspec.comm.cost import CostModel
from shardspec.comm.curves import KINDS, Curve, Line
from shardspec.errors import CheckpointError, InputFileError, MeshError, ProfileError
from shardspec.input_files import read_input_file
from shardspec.mesh import DeviceMesh, LinkModel
from shardspec.profiling.fit import Fit, Measurement, curves_of_groups, fit_links, fitted
from shardspec.text import seconds_text, table_text

_FORMAT: Final = "shardspec profile"
_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20
_ALIKE: Final = 1e-6
_MOST_DEVICES: Final = 2**20
_SECONDS: Final = (1e-9, 1e6)
"""Outside these no step is timed; what is read must not overflow in a fit either."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured on a mesh, and the fits of both link models."""

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None
    ring: Fit
    shared_bus: Fit
    link_model: LinkModel
    """The model that fits better."""
    measurements: tuple[Measurement, ...]
    curves: tuple[tuple[tuple[int, ...], tuple[Curve, ...]], ...]
    """Of every collective along every group of axes that was measured."""
    facts: tuple[tuple[str, str], ...]
    """Where and when: backend, device, ranks, date and the like, by name."""

    @property
    def fit(self) -> Fit:
        """The fit of the chosen model."""
        return self.ring if self.link_model == "ring" else self.shared_bus

    @property
    def known_error(self) -> str:
        """How far prices are off from what was measured, each size priced from the others."""
        return self.cost_model.known_error

    @property
    def cost_model(self) -> CostModel:
        """The curves, and the chosen model with its links for what has none."""
        return replace(self.fit.cost_model(self.mesh_shape), measured=self.curves)

    def table(self) -> str:
        """Return the links of every axis and how well each model fits, as text."""
        labels = self.axis_names or tuple(map(str, range(len(self.mesh_shape))))
        rows = [
            [
                f"{fit.link_model}{' (chosen)' if fit is self.fit else ''}",
                label,
                str(devices),
                seconds_text(link.latency_s),
                f"{1e-9 / link.seconds_per_byte:.4g} GB/s" if link.seconds_per_byte else "free",
                f"{fit.typical_error:.1%}",
                f"{fit.worst_error:.1%}",
            ]
            for fit in (self.ring, self.shared_bus)
            for label, devices, link in zip(labels, self.mesh_shape, fit.links, strict=True)
        ]
        header = ["model", "axis", "devices", "latency", "rate", "typical error", "worst"]
        links = table_text(header, rows, numbers_from=2)
        return f"{self._curves_table(labels)}\n\nelsewhere:\n{links}"

    def _curves_table(self, labels: Sequence[str]) -> str:
        rows = [
            [
                curve.kind,
                ",".join(labels[axis] for axis in axes),
                str(curve.devices),
                *(_line_text(line) for line in (curve.lines[0], curve.lines[-1])),
                *(f"{band.median:.0%}, {band.most:.0%}" if band else "" for band in curve.errors),
            ]
            for axes, curves in self.curves
            for curve in curves
        ]
        header = ["collective", "axes", "devices", "low latency", "high rate"]
        return table_text([*header, "error", "from 1 MiB"], rows, numbers_from=2)

    def to_json(self) -> str:
        """Return the profile as the text of its file."""
        model = self.cost_model
        record = {
            "format": _FORMAT,
            "version": _VERSION,
            "mesh_shape": self.mesh_shape,
            "axis_names": self.axis_names,
            "link_model": self.link_model,
            "known_error": self.known_error,
            "fits": self._fits(),
            "facts": dict(self.facts),
            "measurements": [
                {**asdict(m), "fitted_seconds": fitted(model, m)} for m in self.measurements
            ],
        }
        return json.dumps(record, indent=1)

    def _fits(self) -> dict[str, dict[str, object]]:
        return {
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

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the profile; it appears under its name when it is complete.

        Raises `OutputExistsError` if there is such a file and `overwrite` is not set, and
        `CheckpointError` if it cannot be written.
        """
        content = self.to_json().encode()

        def fill(fd: int) -> None:
            os.pwrite(fd, content, 0)

        write_atomically(Path(path), len(content), fill, overwrite=overwrite)

    @classmethod
    def load(cls, path: Path | str) -> "Profile":
        """Read a profile that `save` wrote; `ProfileError` if it is none, or damaged."""
        try:
            return _read(Path(path))
        except (CheckpointError, InputFileError) as error:
            raise ProfileError(str(error)) from None


def _line_text(line: Line) -> str:
    fixed, slope = line
    return f"{seconds_text(fixed)} + {f'{1e-9 / slope:.4g} GB/s' if slope else 'free'}"


def make_profile(
    mesh_shape: tuple[int, ...],
    axis_names: tuple[str, ...] | None,
    measurements: Sequence[Measurement],
    facts: dict[str, str],
) -> Profile:
    """Fit both link models to measurements and choose the one that is nearer on the mean.

    An axis with too few measurements is a `ProfileError`.
    """
    ring = fit_links(mesh_shape, measurements, "ring")
    bus = fit_links(mesh_shape, measurements, "shared-bus")
    # Along one axis alone both say the same; then it is the simpler one.
    nearer = bus if bus.mean_error < ring.mean_error - _ALIKE else ring
    return Profile(
        mesh_shape,
        axis_names,
        ring,
        bus,
        nearer.link_model,
        tuple(measurements),
        curves_of_groups(mesh_shape, measurements),
        tuple(facts.items()),
    )


def _read(path: Path) -> Profile:
    if not os.path.isfile(path):
        raise ProfileError(f"{path}: there is no such file; 'shardspec profile' makes one")
    data = read_input_file(path, _MOST_BYTES)
    root = checked(parse_json(data, path, "profile"), dict, path, "the profile")
    if root.get("format") != _FORMAT:
        raise ProfileError(f"{path}: is no profile; 'shardspec profile' makes one")
    version = field(root, "version", int, path, "")
    if version != _VERSION:
        raise ProfileError(
            f"{path}: is of version {version}, but this reads version {_VERSION}; measure again "
            "or update"
        )
    shape = field(root, "mesh_shape", tuple, path, "")
    if not 0 < prod(shape) <= _MOST_DEVICES:
        raise ProfileError(f"{path}: mesh_shape {list(shape)} is no mesh")
    axis_names = None
    if root.get("axis_names") is not None:
        names = field(root, "axis_names", list, path, "")
        axis_names = tuple(checked(name, str, path, "axis_names") for name in names)
    try:
        DeviceMesh(range(prod(shape)), shape, axis_names=axis_names)
    except MeshError as error:
        raise ProfileError(f"{path}: {error}") from None
    facts = field(root, "facts", dict, path, "")
    measurements = [
        _measurement(item, path, f"measurements[{number}]", shape)
        for number, item in enumerate(field(root, "measurements", list, path, ""))
    ]
    profile = make_profile(
        shape, axis_names, measurements, {k: checked(v, str, path, k) for k, v in facts.items()}
    )
    # The fits follow from the measurements, so a file whose fits do not is not to be trusted.
    fits = field(root, "fits", dict, path, "")
    for key, said, due in (
        ("link_model", root.get("link_model"), profile.link_model),
        *((f"fits.{name}", fits.get(name), fit) for name, fit in profile._fits().items()),
    ):
        if not _alike(said, due):
            raise ProfileError(
                f"{path}: {key} is {said!r:.60}, which does not follow from the measurements; by "
                f"these it is {due!r:.60}. The file was changed, measure again"
            )
    return profile


def _alike(found: object, expected: object) -> bool:
    """Whether two records are the same but for the rounding of another machine."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(
            _alike(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(_alike, found, expected))
    if isinstance(expected, float) and isinstance(found, float):
        return isclose(found, expected, rel_tol=_ALIKE, abs_tol=1e-15)
    return found == expected


def _measurement(value: object, path: Path, key: str, mesh_shape: Sequence[int]) -> Measurement:
    item = checked(value, dict, path, key)
    kind = field(item, "kind", str, path, key)
    if kind not in KINDS:
        raise ProfileError(f"{path}: {key}.kind {kind!r} is none of {', '.join(KINDS)}")
    axes = field(item, "axes", tuple, path, key)
    if not axes or len(set(axes)) != len(axes) or max(axes) >= len(mesh_shape):
        raise ProfileError(f"{path}: {key}.axes {list(axes)} are no axes of the mesh")
    num_bytes = field(item, "num_bytes", int, path, key)
    if num_bytes < 1:
        raise ProfileError(f"{path}: {key}.num_bytes is 0, but a step moves something")
    seconds = field(item, "seconds", object, path, key)
    least, most = _SECONDS
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not least <= seconds <= most
    ):
        raise ProfileError(
            f"{path}: {key}.seconds should be a number above 0 but is {str(seconds)[:24]}; a step "
            f"takes from {least:g} to {most:g} s"
        )
    return Measurement(kind, axes, num_bytes, float(seconds))
