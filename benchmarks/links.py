"""Curves of collectives fitted to published times: the tables of presets, errors and a plot.

    python -m benchmarks.links benchmarks/nccl-single-node.csv --plot docs/links.svg

The file has the columns preset, collective, devices, buffer_bytes and microseconds: medians of the
nccl-tests tables of aiconfigurator (github.com/ai-dynamo/aiconfigurator, Apache-2.0, commit
095f58a; a100_sxm, b200_sxm, gb200, h100_sxm and h200_sxm there). Printed are the numbers of
``[inside]`` for each file of shardspec/comm/links, and the table of errors of docs/plans.md. `make
docs` draws the plot.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product, starmap
from math import ceil, floor, log10
from pathlib import Path

import numpy as np

from shardspec.comm.cluster_file import LinkPreset
from shardspec.comm.cost import CostModel
from shardspec.comm.curves import Curve, Line, Link, curve_between, exchange_floor, share
from shardspec.comm.presets import link_preset, preset_names
from shardspec.comm.steps import AllGather
from shardspec.profiling.fit import (
    Times,
    candidate_lines,
    fit_curve,
    middle_and_most,
    unseen_errors,
)

LARGE = 1 << 20
"""The size in bytes from which on errors are also listed on their own."""
SAME_LINKS = {"h100-nvswitch": "h200-nvswitch", "h200-nvswitch": "h100-nvswitch"}
KIND = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
}
JOINING = [name for name in preset_names() if link_preset(name).link.port]
"""Links between nodes."""
COLORS = dict(zip(KIND.values(), ("#1f6feb", "#d29922", "#cf222e", "#1a7f37"), strict=True))


def read(path: Path) -> dict[str, dict[tuple[str, int], Times]]:
    """Return times by preset, then by collective and number of devices."""
    found: dict[str, dict[tuple[str, int], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    with path.open() as file:
        for row in csv.DictReader(file):
            time = float(row["buffer_bytes"]), float(row["microseconds"]) / 1e6
            found[row["preset"]][KIND[row["collective"]], int(row["devices"])].append(time)
    return {name: {k: sorted(each) for k, each in of.items()} for name, of in found.items()}


def growing_with_devices(
    measured: Mapping[tuple[str, int], Times],
) -> dict[tuple[str, int], Callable[[Curve], bool]]:
    """Return which curves of all-gathers go with those of the other numbers of devices.

    Of each number there are several fits nearly as good: where one number's protocol changes at
    another size, the nearest of each make a gather of more devices cheaper. Those that are near
    together are chosen.
    """
    numbers = sorted(n for kind, n in measured if kind == "all-gather")
    fits = [
        [
            (off, Curve("all-gather", n, lines, (0, 0)))
            for off, lines in candidate_lines(measured["all-gather", n])
        ]
        for n in numbers
    ]
    nearest = sorted(product(*fits), key=lambda some: sum(off for off, _ in some))
    chosen = next(
        [curve for _, curve in some]
        for some in nearest
        if all(starmap(grows, pairwise(curve for _, curve in some)))
    )

    def beside(place: int, curve: Curve) -> bool:
        others = [*chosen[:place], curve, *chosen[place + 1 :]]
        return all(starmap(grows, pairwise(others[max(place - 1, 0) : place + 2])))

    return {("all-gather", n): partial(beside, place) for place, n in enumerate(numbers)}


@cache
def grows(few: Curve, many: Curve) -> bool:
    """Whether more devices that hold as much never gather it sooner, in one node or in several."""
    sizes = 2 ** np.arange(10, 33, 0.25)
    within = Link(0.0, 0.0, curves=(few, many))
    for nodes, name in ((1, "unit"), *product((2, 8, 32), JOINING)):
        times, joining = [], link_preset(name).link
        for n in range(few.devices, 2 * many.devices if nodes == 1 else many.devices + 1):
            lines = CostModel((nodes, n), (joining, within)).lines(AllGather(0, (0, 1)))
            times.append(np.min([fixed + slope * sizes for fixed, slope in lines], axis=0))
        if (np.diff(times, axis=0) < 0).any():
            return False
    return True


Errors = list[tuple[float, float]]
"""Pairs of bytes and relative error."""


def fit_curves(measured: Mapping[tuple[str, int], Times]) -> tuple[tuple[Curve, ...], Errors]:
    """Return the curves of times, and the errors at each size when it is left out."""
    accepts = growing_with_devices(measured)
    curves: list[Curve] = []
    errors: Errors = []
    for (kind, n), times in measured.items():
        fit = partial(fit_curve, kind, n, accepts=accepts.get((kind, n), bool))
        curves.append(fit(times))
        sizes = (size for size, _ in times)
        errors += zip(sizes, unseen_errors(times, fit), strict=True)
    return tuple(curves), errors


def errors_of(curves: Sequence[Curve], measured: Mapping[tuple[str, int], Times]) -> Errors:
    """Return the errors of curves at measured times."""
    return [
        (size, abs(curve.seconds(size) / seconds - 1))
        for curve in curves
        for size, seconds in measured.get((curve.kind, curve.devices), ())
    ]


def errors_between(curves: Sequence[Curve], measured: Mapping[tuple[str, int], Times]) -> Errors:
    """Return the errors where four devices are priced from two and eight."""
    rest = [curve for curve in curves if curve.devices != 4]
    guesses = [curve_between(rest, kind, 4) for kind in KIND.values()]
    return errors_of([g for g in guesses if g and g.sizes != (0, 0)], measured)


def preset_text(name: str, curves: Sequence[Curve], errors: Sequence[float]) -> str:
    """Return the text of a preset's file, as far as measured times tell it.

    Rate and start are those of an exchange, which was not measured: the least for which no exchange
    is cheaper than the all-gather or all-to-all that sends as much.
    """
    curves = [replace(curve, lines=rounded(curve)) for curve in curves]
    most = max(curve.devices for curve in curves)
    each = product(("all-gather", "all-to-all"), range(2, 1 + most))
    every = list(filter(None, (curve_between(curves, kind, n) for kind, n in each)))
    rate = floor(1e-9 / exchange_floor(every)[1])
    # The start goes with the rounded rate.
    first = every[0]
    line = 0.0, float(share(first.kind, first.devices)) * 1e-9 / rate
    start, _ = exchange_floor([*every, replace(first, lines=(line,))])
    error = middle_and_most(errors)
    median, most_off = (round(part, 3) for part in error or (0.0, 0.0))
    link = Link(
        0.0,
        1e-9 / rate,
        name,
        ceil(start * 2e6) / 2e6,
        tuple(curves),
        error=(median, most_off),
    )
    return LinkPreset(name, link).text()


def rounded(curve: Curve) -> tuple[Line, ...]:
    """Return the lines of a curve with as many digits as files have."""
    return tuple(
        (float(f"{fixed * 1e6:.2f}") / 1e6, float(f"{slope * 1e12:.4g}") / 1e12)
        for fixed, slope in curve.lines
    )


def plot(points: list[tuple[str, str, float, float]]) -> str:
    """Draw measured against predicted, by hardware: a point is (kind, machine, x, y)."""
    machines, columns, step = list(dict.fromkeys(m for _, m, _, _ in points)), 3, 340
    panels = [
        f'<g transform="translate({place % columns * step},{place // columns * step})">\n'
        + panel(machine, [(k, p, m) for k, of, p, m in points if of == machine])
        + "\n</g>"
        for place, machine in enumerate(machines)
    ]
    width, height = columns * step, -(-len(machines) // columns) * step
    body = "\n".join(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" fill="none">\n<style>text{{font:12px sans-serif;'
        f"fill:#1f2328}}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def panel(title: str, points: list[tuple[str, float, float]]) -> str:
    """Draw the points (kind, predicted, measured) of one machine, both axes logarithmic."""
    low, high, size, margin = -5.5, -2.0, 240, 56
    span = high - low

    def at(seconds: float) -> float:
        return (log10(seconds) - low) / span * size

    parts = [
        f'<path stroke="#59636e" stroke-dasharray="4 4" '
        f'd="M{margin} {margin + size}l{size} {-size}"/>'
    ]
    for exponent, label in ((-5, "10 µs"), (-4, "100 µs"), (-3, "1 ms"), (-2, "10 ms")):
        x = at(10.0**exponent)
        parts.append(
            f'<path stroke="#d0d7de" d="M{margin + x:.0f} {margin}v{size}M{margin} '
            f'{margin + size - x:.0f}h{size}"/>'
            f'<text x="{margin + x:.0f}" y="{margin + size + 16}" text-anchor="middle">'
            f'{label}</text><text x="{margin - 6}" y="{margin + size - x + 4:.0f}" '
            f'text-anchor="end">{label}</text>'
        )
    for kind, x, y in sorted({(k, round(at(p), 1), round(at(m), 1)) for k, p, m in points}):
        parts.append(
            f'<circle cx="{margin + x:.1f}" cy="{margin + size - y:.1f}" r="1.6" '
            f'fill="{COLORS[kind]}" fill-opacity=".6"/>'
        )
    for line, (kind, color) in enumerate(COLORS.items()):
        y = margin + 16 + 16 * line
        parts.append(
            f'<circle cx="{margin + 12}" cy="{y - 4}" r="4" fill="{color}"/>'
            f'<text x="{margin + 22}" y="{y}">{kind}</text>'
        )
    parts.append(
        f'<text x="{margin}" y="20" font-weight="bold">{title}: measured ↑, predicted →</text>'
    )
    return "\n".join(parts)


def cells(errors: Errors) -> str:
    """Return the median and the 90th percentile in percent, of all sizes and of large ones."""
    large = [error for size, error in errors if size >= LARGE]
    pairs = map(middle_and_most, ([error for _, error in errors], large))
    return " | ".join(f"{p[0]:.1%} / {p[1]:.1%}" if p else "" for p in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    times = read(given.times)
    rows, points = [], []
    for name, measured in times.items():
        curves, errors = fit_curves(measured)
        print(f"--- {name}.toml\n{preset_text(name, curves, [error for _, error in errors])}")
        points += [
            (curve.kind, name, curve.seconds(size), seconds)
            for curve in curves
            for size, seconds in measured[curve.kind, curve.devices]
        ]
        rows.append(f"| {name} | each size left out | {len(errors)} | {cells(errors)} |")
        between = errors_between(curves, measured)
        if between:
            rows.append(f"| | 4 devices from 2 and 8 | {len(between)} | {cells(between)} |")
        if name in SAME_LINKS:
            other = SAME_LINKS[name]
            across = errors_of(curves, times[other])
            rows.append(f"| | times of {other} | {len(across)} | {cells(across)} |")
    print("| preset | priced | times | median / 90th | from 1 MiB |\n" + "| --- " * 5 + "|")
    print("\n".join(rows))
    if given.plot:
        given.plot.write_text(plot(points))


if __name__ == "__main__":
    main()
