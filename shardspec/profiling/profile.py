"""A profile of a cluster: measured times, the links that fit them, and the file they lie in."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isclose, prod
from pathlib import Path
from typing import Final, get_args

from shardspec.checkpoint.commit import write_atomically
from shardspec.checkpoint.strict_json import checked, field, parse_json
from shardspec.comm.cost import CostModel
from shardspec.comm.curves import KINDS, Curve, Line
from shardspec.errors import CheckpointError, MeshError, ProfileError
from shardspec.mesh import DeviceMesh, LinkModel
from shardspec.profiling.fit import Fit, Measurement, curves_of_groups, fit_links, step_of
from shardspec.text import seconds_text, table_text

__all__ = ["Profile", "fitted", "make_profile"]

_FORMAT: Final = "shardspec profile"
_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20
_ALIKE: Final = 1e-6
_MOST_DEVICES: Final = 2**20
_SECONDS: Final = (1e-9, 1e6)
"""Outside these no step is timed; what is read must not overflow in a fit either."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured on a mesh, and the fits of both link models.

    Examples
    --------
    >>> times = [Measurement("all-gather", (0,), b, 1e-5 + 3e-10 * b) for b in (4096, 65536)]
    >>> profile = make_profile((2,), None, times, {"backend": "gloo"})
    >>> profile.cost_model.links_text(["0"])
    'axis 0 measured: 10 µs, 3.333 GB/s'
    """

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
            "fits": {fit.link_model: _fit_record(fit) for fit in (self.ring, self.shared_bus)},
            "facts": dict(self.facts),
            "measurements": [
                {**asdict(m), "fitted_seconds": fitted(model, m)} for m in self.measurements
            ],
        }
        return json.dumps(record, indent=1)

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the profile; it appears under its name when it is complete.

        Raises
        ------
        OutputExistsError
            If there is such a file and `overwrite` is not set.
        CheckpointError
            If the file cannot be written.
        """
        content = self.to_json().encode()

        def fill(fd: int) -> None:
            os.pwrite(fd, content, 0)

        write_atomically(Path(path), len(content), fill, overwrite=overwrite)

    @classmethod
    def load(cls, path: Path | str) -> "Profile":
        """Read a profile that `save` wrote.

        Raises
        ------
        ProfileError
            If the file is missing, damaged, of another kind or of a newer version.
        """
        try:
            return _read(Path(path))
        except CheckpointError as error:
            raise ProfileError(str(error)) from None


def _line_text(line: Line) -> str:
    fixed, slope = line
    return f"{seconds_text(fixed)} + {f'{1e-9 / slope:.4g} GB/s' if slope else 'free'}"


def fitted(model: CostModel, measured: Measurement) -> float:
    """Return the seconds that a model says of a measurement."""
    return model.step_seconds(step_of(measured.kind, measured.axes), measured.num_bytes)


def make_profile(
    mesh_shape: tuple[int, ...],
    axis_names: tuple[str, ...] | None,
    measurements: Sequence[Measurement],
    facts: dict[str, str],
) -> Profile:
    """Fit both link models to measurements and choose the one that is nearer on the mean.

    Raises
    ------
    ProfileError
        If an axis has too few measurements.
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


def _fit_record(fit: Fit) -> dict[str, object]:
    return {
        "links": [
            {"latency_s": link.latency_s, "seconds_per_byte": link.seconds_per_byte}
            for link in fit.links
        ],
        "typical_error": fit.typical_error,
        "worst_error": fit.worst_error,
        "mean_error": fit.mean_error,
    }


def _read(path: Path) -> Profile:
    try:
        if not path.is_file():
            raise ProfileError(f"{path}: there is no such file; 'shardspec profile' makes one")
        if path.stat().st_size > _MOST_BYTES:
            raise ProfileError(f"{path}: is too large for a profile")
        data = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
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
    if not shape or min(shape) < 1 or prod(shape) > _MOST_DEVICES:
        raise ProfileError(f"{path}: mesh_shape {list(shape)} is no mesh")
    names = root.get("axis_names")
    axis_names = (
        None
        if names is None
        else tuple(
            checked(n, str, path, "axis_names") for n in field(root, "axis_names", list, path, "")
        )
    )
    if axis_names is not None and len(axis_names) != len(shape):
        raise ProfileError(f"{path}: {len(axis_names)} axis names for {len(shape)} axes")
    try:
        DeviceMesh(range(prod(shape)), shape, axis_names=axis_names)
    except MeshError as error:
        raise ProfileError(f"{path}: {error}") from None
    facts = field(root, "facts", dict, path, "")
    measurements = [
        _measurement(item, path, f"measurements[{i}]", shape)
        for i, item in enumerate(field(root, "measurements", list, path, ""))
    ]
    profile = make_profile(
        shape, axis_names, measurements, {k: checked(v, str, path, k) for k, v in facts.items()}
    )
    # The fits follow from the measurements, so a file whose fits do not is not to be trusted.
    stated = field(root, "link_model", object, path, "")
    if stated not in get_args(LinkModel) or stated != profile.link_model:
        raise ProfileError(
            f"{path}: says that the model {stated!r} fits best, but its measurements say "
            f"{profile.link_model!r}; the file was changed, measure again"
        )
    fits = field(root, "fits", dict, path, "")
    for fit in (profile.ring, profile.shared_bus):
        key = f"fits.{fit.link_model}"
        record = field(fits, fit.link_model, dict, path, "fits")
        if not _alike(record, _fit_record(fit)):
            raise ProfileError(
                f"{path}: {key} does not follow from the measurements; the file was changed, "
                "measure again"
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


def _measurement(found: object, path: Path, key: str, mesh_shape: tuple[int, ...]) -> Measurement:
    item = checked(found, dict, path, key)
    kind = field(item, "kind", str, path, key)
    if kind not in KINDS:
        raise ProfileError(f"{path}: {key}.kind {kind!r} is none of {', '.join(KINDS)}")
    axes = field(item, "axes", tuple, path, key)
    if not axes or len(set(axes)) != len(axes) or max(axes) >= len(mesh_shape):
        raise ProfileError(f"{path}: {key}.axes {list(axes)} are no axes of the mesh")
    num_bytes = field(item, "num_bytes", int, path, key)
    seconds = field(item, "seconds", object, path, key)
    if num_bytes < 1:
        raise ProfileError(f"{path}: {key}.num_bytes is 0, but a step moves something")
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
