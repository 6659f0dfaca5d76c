"""A profile of a cluster: measured times and fits, with tables, charts and a file format."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil, floor, log10
from typing import Final
from xml.etree.ElementTree import Element

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import KINDS, Line
from shardspec.comm.profile_file import PROFILE_FORMAT, PROFILE_VERSION
from shardspec.layout.picture import draw, style_sheet, svg_page
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
        return replace(self.fit.model, measured=curves)

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

        The measurements, each with its modelled time, are for human readers.
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


_LETTERS: Final = dict(zip(KINDS, "gsra", strict=True))
_COLOURS: Final = dict(zip(KINDS, ("#1f6feb", "#d29922", "#cf222e", "#1a7f37"), strict=True))
_COLUMNS: Final = 61
_LINES: Final = 21
_PIXELS: Final = 420
_MARGIN: Final = 70
_STYLE: Final = style_sheet(
    "shardspec-chart",
    {
        " .grid": "stroke:#d0d7de;fill:none",
        " .same": "stroke:#59636e;stroke-dasharray:4 4;fill:none",
    },
    {" .grid": "stroke:#30363d", " .same": "stroke:#9198a1"},
)


class _Scale:
    """The points of a profile, as kind, fitted and measured, on a scale of whole decades."""

    def __init__(self, profile: Profile) -> None:
        model = profile.cost_model
        self.points = [
            (m.kind, log10(max(fitted(model, m), 1e-12)), log10(m.seconds))
            for m in profile.measurements
        ]
        logs = [value for _, *pair in self.points for value in pair]
        self.low = floor(min(logs))
        self.high = max(ceil(max(logs)), self.low + 1)
        self.labels = {at: seconds_text(10.0**at) for at in range(self.low, self.high + 1)}

    def place(self, value: float, steps: int) -> float:
        return (value - self.low) / (self.high - self.low) * steps


def chart_text(profile: Profile) -> str:
    """Return a text chart of measured against fitted times on logarithmic scales.

    On the diagonal the fit is exact. Each letter is a measurement; of several at one place the last
    is visible.
    """
    scale = _Scale(profile)
    grid = [[" "] * _COLUMNS for _ in range(_LINES)]
    for column in range(_COLUMNS):
        grid[round(column / (_COLUMNS - 1) * (_LINES - 1))][column] = "·"
    for kind, across, up in scale.points:
        row = grid[round(scale.place(up, _LINES - 1))]
        row[round(scale.place(across, _COLUMNS - 1))] = _LETTERS[kind]
    ticks = {round(scale.place(at, _LINES - 1)): label for at, label in scale.labels.items()}
    lines = ["measured"]
    for line in reversed(range(_LINES)):
        label = ticks.get(line, "")
        lines.append(f"{label:>8} {'┤' if label else '│'}{''.join(grid[line])}".rstrip())
    below = [" "] * (_COLUMNS + 8)
    for decade, label in scale.labels.items():
        at = round(scale.place(decade, _COLUMNS - 1))
        below[at : at + len(label)] = label
    legend = ", ".join(f"{letter} {kind}" for kind, letter in _LETTERS.items())
    lines.append(f"{'':>8} └{'─' * _COLUMNS}")
    lines.append(f"{'':>10}{''.join(below).rstrip()}   fitted")
    return "\n".join([*lines, f"{legend}; · where both are the same"])


def chart_svg(profile: Profile) -> str:
    """Return the chart of `chart_text` as SVG; points have titles."""
    scale = _Scale(profile)
    size, far = _PIXELS + 2 * _MARGIN, _PIXELS + _MARGIN
    root = Element("svg", {"class": "shardspec-chart", "role": "img"})

    def text(x: float, y: float, words: str, anchor: str = "start") -> None:
        draw(root, "text", words, x=x, y=y, text_anchor=anchor)

    def point(x: float, y: float, kind: str) -> Element:
        return draw(root, "circle", cx=x, cy=y, r=4, fill=_COLOURS[kind])

    for decade, label in scale.labels.items():
        x = _MARGIN + scale.place(decade, _PIXELS)
        draw(root, "path", class_="grid", d=f"M{x} {_MARGIN}V{far}M{_MARGIN} {size - x}H{far}")
        text(x, far + 18, label, "middle")
        text(_MARGIN - 6, size - x + 4, label, "end")
    draw(root, "path", class_="same", d=f"M{_MARGIN} {far}L{far} {_MARGIN}")
    for (kind, across, up), measured in zip(scale.points, profile.measurements, strict=True):
        title = (
            f"{kind} over axes {','.join(map(str, measured.axes))}, {measured.num_bytes} bytes: "
            f"{seconds_text(10**up)} measured, {seconds_text(10**across)} fitted"
        )
        x, y = (scale.place(value, _PIXELS) for value in (across, up))
        draw(point(_MARGIN + x, far - y, kind), "title", title)
    for line, kind in enumerate(_COLOURS):
        point(_MARGIN + 14, _MARGIN + 12 + 18 * line, kind)
        text(_MARGIN + 24, _MARGIN + 16 + 18 * line, kind)
    text(size / 2, size - 26, "fitted", "middle")
    text(_MARGIN, _MARGIN - 30, profile.cost_model.known_error)
    text(_MARGIN - 40, _MARGIN - 10, "measured")
    return svg_page(root, size, size, _STYLE) + "\n"
