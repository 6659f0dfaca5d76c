"""Measured against fitted times, both on logarithmic scales: on the diagonal the fit is exact."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final, TypeAlias

from shardspec.comm.curves import KINDS
from shardspec.profiling.fit import fitted
from shardspec.profiling.profile import Profile
from shardspec.text import seconds_text

_Points: TypeAlias = Sequence[tuple[str, float, float]]
"""Kind, and the logarithms of fitted and of measured seconds."""

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


def _points_and_span(profile: Profile) -> tuple[_Points, int, int]:
    """Return the points of the measurements, and the decades that they lie between."""
    model = profile.cost_model
    points = [
        (m.kind, log10(max(fitted(model, m), 1e-12)), log10(m.seconds))
        for m in profile.measurements
    ]
    logs = [value for _, *pair in points for value in pair]
    low = floor(min(logs))
    return points, low, max(ceil(max(logs)), low + 1)


def chart_text(profile: Profile) -> str:
    """Draw the chart as text; a letter is a measurement, and the last one at a place is seen."""
    points, low, high = _points_and_span(profile)
    grid = [[" "] * _COLUMNS for _ in range(_LINES)]

    def place(value: float, steps: int) -> int:
        return round((value - low) / (high - low) * (steps - 1))

    for column in range(_COLUMNS):
        grid[place(low + column / (_COLUMNS - 1) * (high - low), _LINES)][column] = "·"
    for kind, across, up in points:
        grid[place(up, _LINES)][place(across, _COLUMNS)] = _LETTERS[kind]
    lines = ["measured"]
    ticks = {place(decade, _LINES): seconds_text(10.0**decade) for decade in range(low, high + 1)}
    for line in reversed(range(_LINES)):
        label = ticks.get(line, "")
        lines.append(f"{label:>8} {'┤' if label else '│'}{''.join(grid[line])}".rstrip())
    lines.append(f"{'':>8} └{'─' * _COLUMNS}")
    below = [" "] * (_COLUMNS + 8)
    for decade in range(low, high + 1):
        text, at = seconds_text(10.0**decade), place(decade, _COLUMNS)
        below[at : at + len(text)] = text
    lines.append(f"{'':>10}{''.join(below).rstrip()}   fitted")
    legend = ", ".join(f"{letter} {kind}" for kind, letter in _LETTERS.items())
    return "\n".join([*lines, f"{legend}; · where both are the same"])


def chart_svg(profile: Profile) -> str:
    """Draw the chart as SVG; the title of a point says what it is."""
    points, low, high = _points_and_span(profile)
    size, far = _PIXELS + 2 * _MARGIN, _PIXELS + _MARGIN

    def place(value: float) -> float:
        return _MARGIN + (value - low) / (high - low) * _PIXELS

    parts = []

    def text(x: float, y: float, words: str, anchor: str = "start") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def point(x: float, y: float, kind: str, title: str = "") -> None:
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_COLOURS[kind]}">{title}</circle>'
        )

    for decade in range(low, high + 1):
        x, y = place(decade), size - place(decade)
        parts.append(f'<path class="grid" d="M{x:.1f} {_MARGIN}V{far}M{_MARGIN} {y:.1f}H{far}"/>')
        text(x, far + 18, seconds_text(10.0**decade), "middle")
        text(_MARGIN - 6, y + 4, seconds_text(10.0**decade), "end")
    parts.append(f'<path class="same" d="M{_MARGIN} {far}L{far} {_MARGIN}"/>')
    for (kind, across, up), measured in zip(points, profile.measurements, strict=True):
        title = (
            f"{kind} over axes {','.join(map(str, measured.axes))}, {measured.num_bytes} bytes: "
            f"{seconds_text(10**up)} measured, {seconds_text(10**across)} fitted"
        )
        point(place(across), size - place(up), kind, f"<title>{escape(title)}</title>")
    for line, kind in enumerate(_COLOURS):
        point(_MARGIN + 14, _MARGIN + 12 + 18 * line, kind)
        text(_MARGIN + 24, _MARGIN + 16 + 18 * line, kind)
    text(size / 2, size - 26, "fitted", "middle")
    text(_MARGIN, _MARGIN - 30, profile.known_error)
    text(_MARGIN - 40, _MARGIN - 10, "measured")
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" '
        f'viewBox="0 0 {size} {size}">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )
