"""Measured against fitted times, both on logarithmic scales: on the diagonal the fit is exact."""

from math import ceil, floor, log10
from typing import Final
from xml.etree.ElementTree import Element

from shardspec.comm.curves import KINDS
from shardspec.layout.picture import draw, svg_page
from shardspec.profiling.fit import fitted
from shardspec.profiling.profile import Profile
from shardspec.text import seconds_text

_LETTERS: Final = dict(zip(KINDS, "gsra", strict=True))
_COLOURS: Final = dict(zip(KINDS, ("#1f6feb", "#d29922", "#cf222e", "#1a7f37"), strict=True))
_COLUMNS: Final = 61
_LINES: Final = 21
_PIXELS: Final = 420
_MARGIN: Final = 70
_STYLE: Final = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}"
    ".grid{stroke:#d0d7de;fill:none}.same{stroke:#59636e;stroke-dasharray:4 4;fill:none}"
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
    """Draw the chart as text; a letter is a measurement, and the last one at a place is seen."""
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
    """Draw the chart as SVG; the title of a point says what it is."""
    scale = _Scale(profile)
    size, far = _PIXELS + 2 * _MARGIN, _PIXELS + _MARGIN
    root = Element("svg")

    def text(x: float, y: float, words: str, anchor: str = "start") -> None:
        draw(root, "text", words, x=x, y=y, text_anchor=anchor)

    def point(x: float, y: float, kind: str) -> Element:
        return draw(root, "circle", cx=x, cy=y, r=4, fill=_COLOURS[kind])

    draw(root, "style", _STYLE)
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
    return svg_page(root, size, size) + "\n"
