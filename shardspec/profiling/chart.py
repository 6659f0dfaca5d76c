"""Measured against fitted times, both on logarithmic scales: on the diagonal the fit is exact."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

from shardspec.comm.curves import KINDS
from shardspec.profiling.profile import Profile, fitted
from shardspec.text import seconds_text

__all__ = ["chart_svg", "chart_text"]

_LETTERS: Final = dict(zip(KINDS, "gsra", strict=True))
_COLOURS: Final = dict(zip(KINDS, ("#1f6feb", "#d29922", "#cf222e", "#1a7f37"), strict=True))
_COLUMNS: Final = 61
_LINES: Final = 21
_PIXELS: Final = 420
_MARGIN: Final = 70


def _points(profile: Profile) -> list[tuple[str, float, float]]:
    """Return the kind, the logarithm of fitted and of measured seconds, of every measurement."""
    model = profile.cost_model
    return [
        (m.kind, log10(max(fitted(model, m), 1e-12)), log10(m.seconds))
        for m in profile.measurements
    ]


def _span(points: Sequence[tuple[str, float, float]]) -> tuple[int, int]:
    logs = [value for _, *pair in points for value in pair]
    low, high = floor(min(logs)), ceil(max(logs))
    return low, max(high, low + 1)


def chart_text(profile: Profile) -> str:
    """Draw the chart as text; a letter is a measurement, and the last one at a place is seen.

    Examples
    --------
    >>> from shardspec.profiling.fit import Measurement
    >>> from shardspec.profiling.profile import make_profile
    >>> times = [Measurement("all-gather", (0,), b, 1e-5 + 3e-10 * b) for b in (4096, 1 << 24)]
    >>> print(chart_text(make_profile((2,), None, times, {})).splitlines()[0])
    measured
    """
    points = _points(profile)
    low, high = _span(points)
    grid = [[" "] * _COLUMNS for _ in range(_LINES)]

    def place(value: float, steps: int) -> int:
        return round((value - low) / (high - low) * (steps - 1))

    for column in range(_COLUMNS):
        grid[place(low + column / (_COLUMNS - 1) * (high - low), _LINES)][column] = "·"
    for kind, across, up in points:
        across = min(max(across, low), high)  # a fit may say 0 s
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
    points = _points(profile)
    low, high = _span(points)
    size = _PIXELS + 2 * _MARGIN

    def place(value: float) -> float:
        return (min(max(value, low), high) - low) / (high - low) * _PIXELS

    parts = []
    for decade in range(low, high + 1):
        at, text = place(decade), seconds_text(10.0**decade)
        x, y = _MARGIN + at, _MARGIN + _PIXELS - at
        far = _MARGIN + _PIXELS
        parts.append(f'<path class="grid" d="M{x:.1f} {_MARGIN}V{far}M{_MARGIN} {y:.1f}H{far}"/>')
        parts.append(f'<text x="{x:.1f}" y="{far + 18}" text-anchor="middle">{text}</text>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(
        f'<path class="same" d="M{_MARGIN} {_MARGIN + _PIXELS}L{_MARGIN + _PIXELS} {_MARGIN}"/>'
    )
    for (kind, across, up), measured in zip(points, profile.measurements, strict=True):
        axes = ",".join(map(str, measured.axes))
        title = (
            f"{kind} over axes {axes}, {measured.num_bytes} bytes: "
            f"{seconds_text(10**up)} measured, {seconds_text(10**across)} fitted"
        )
        parts.append(
            f'<circle cx="{_MARGIN + place(across):.1f}" '
            f'cy="{_MARGIN + _PIXELS - place(up):.1f}" r="4" fill="{_COLOURS[kind]}">'
            f"<title>{escape(title)}</title></circle>"
        )
    for line, (kind, colour) in enumerate(_COLOURS.items()):
        y = _MARGIN + 16 + 18 * line
        parts.append(f'<circle cx="{_MARGIN + 14}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_MARGIN + 24}" y="{y}">{kind}</text>')
    middle = _MARGIN + _PIXELS / 2
    parts.append(f'<text x="{middle}" y="{size - 26}" text-anchor="middle">fitted</text>')
    parts.append(f'<text x="{_MARGIN}" y="{_MARGIN - 30}">{escape(profile.known_error)}</text>')
    parts.append(f'<text x="{_MARGIN - 40}" y="{_MARGIN - 10}">measured</text>')
    style = (
        "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}"
        ".grid{stroke:#d0d7de;fill:none}.same{stroke:#59636e;stroke-dasharray:4 4;fill:none}"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" '
        f'viewBox="0 0 {size} {size}">\n<style>{style}</style>\n{body}\n</svg>\n'
    )
