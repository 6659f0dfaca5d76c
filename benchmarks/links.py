"""Curves of collectives fitted to published times: the numbers of the presets, table and plot.

    python -m benchmarks.links benchmarks/nccl-single-node.csv --plot docs/links.svg > fitted.txt

The file has the columns machine, nccl, collective, devices, buffer_bytes and microseconds: medians
of the nccl-tests tables of aiconfigurator (github.com/ai-dynamo/aiconfigurator, Apache-2.0, commit
095f58a). Printed are the rates, starts and curves of shardspec/comm/presets.json, and the table of
errors of docs/plans.md. `make docs` draws the plot.
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

from shardspec.comm.cost import CostModel
from shardspec.comm.curves import (
    LARGE,
    Band,
    Curve,
    Line,
    Link,
    curve_between,
    exchange_floor,
    share,
)
from shardspec.comm.presets import PRESETS, link_preset
from shardspec.comm.steps import AllGather
from shardspec.profiling.fit import Times, bands, candidate_lines, fit_curve

MACHINES = {
    "a100_sxm": "a100-nvswitch",
    "h100_sxm": "h100-nvswitch",
    "h200_sxm": "h200-nvswitch",
    "b200_sxm": "b200-nvswitch",
    "gb200": "gb200-nvl72",
}
WITHOUT_PRESET = {"l40s"}
"""Machines whose times are in the file too, but devices are on PCIe in many ways."""
OTHER = {"h100_sxm": "h200_sxm", "h200_sxm": "h100_sxm"}
"""Machines with the same links. Their NCCL versions are not known: rows contradict the labels."""
KIND = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
}
JOINING = [name for name, preset in PRESETS.items() if preset.port]
"""Links between nodes."""
COLORS = dict(zip(KIND.values(), ("#1f6feb", "#d29922", "#cf222e", "#1a7f37"), strict=True))


def read(path: Path) -> dict[str, dict[tuple[str, int], Times]]:
    by_machine: dict[str, dict[tuple[str, int], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    with path.open() as file:
        rows = list(csv.DictReader(file))
    machines = {row["machine"] for row in rows}
    if unknown := sorted(machines - MACHINES.keys() - WITHOUT_PRESET):
        raise SystemExit(f"{path}: no preset for {unknown[0]!r}; known: {', '.join(MACHINES)}")
    for row in rows:
        if row["machine"] in MACHINES:
            key = KIND[row["collective"]], int(row["devices"])
            time = float(row["buffer_bytes"]), float(row["microseconds"]) / 1e6
            by_machine[row["machine"]][key].append(time)
    return {m: {k: sorted(times) for k, times in rows.items()} for m, rows in by_machine.items()}


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
        times = []
        for n in range(few.devices, 2 * many.devices if nodes == 1 else many.devices + 1):
            lines = CostModel((nodes, n), (link_preset(name), within)).lines(AllGather(0, (0, 1)))
            times.append(np.min([fixed + slope * sizes for fixed, slope in lines], axis=0))
        if (np.diff(times, axis=0) < 0).any():
            return False
    return True


def fit_curves(
    measured: Mapping[tuple[str, int], Times], other: Mapping[tuple[str, int], Times] | None = None
) -> tuple[Curve, ...]:
    """Return the curves of times by collective and number of devices.

    Each number of devices between two others is also left out once, and priced from these.
    """
    accepts = growing_with_devices(measured)
    fitted = [
        fit_curve(kind, n, times, (other or {}).get((kind, n), ()), accepts.get((kind, n), bool))
        for (kind, n), times in measured.items()
    ]
    curves = []
    for curve in fitted:
        rest = [each for each in fitted if each is not curve]
        numbers = [each.devices for each in rest if each.kind == curve.kind]
        if numbers and min(numbers) < curve.devices < max(numbers):
            guess = curve_between(rest, curve.kind, curve.devices)
            assert guess is not None, "there is one on either side"
            times = measured[curve.kind, curve.devices]
            off = ((size, abs(guess.seconds(size) / seconds - 1)) for size, seconds in times)
            curve = replace(curve, left_out=bands(off))
        curves.append(curve)
    return tuple(curves)


def row_of(machine: str, curve: Curve) -> str:
    lines = [f"{fixed * 1e6:.2f} {slope * 1e12:.4g}" for fixed, slope in curve.lines]
    if len(lines) == 1:
        lines *= 2
    errors = [shown(band) for band in (*curve.errors, *curve.left_out)]
    return " ".join([MACHINES[machine], curve.kind, str(curve.devices), *lines, *errors])


def exchange_row(machine: str, fitted: Sequence[Curve]) -> str:
    """Return the rate and the start of an exchange, which are not measured.

    They are the least for which no exchange is cheaper than the all-gather or all-to-all that
    sends as much, among as many devices as were measured.
    """
    fitted = [replace(curve, lines=rounded(curve)) for curve in fitted]
    most = max(curve.devices for curve in fitted)
    each = product(("all-gather", "all-to-all"), range(2, 1 + most))
    curves = [curve_between(fitted, kind, n) for kind, n in each]
    rate = floor(1e-9 / exchange_floor(filter(None, curves))[1])
    # The start goes with the rounded rate.
    slower = [
        replace(curve, lines=((0.0, float(share(curve.kind, curve.devices)) * 1e-9 / rate),))
        for curve in curves[:1]
        if curve is not None
    ]
    start, _ = exchange_floor([*filter(None, curves), *slower])
    return f"{MACHINES[machine]} gb_per_s {rate} start_us {ceil(start * 2e6) / 2:g}"


def rounded(curve: Curve) -> tuple[Line, ...]:
    """Return the lines of a curve as rows have them."""
    return tuple(
        (float(f"{fixed * 1e6:.2f}") / 1e6, float(f"{slope * 1e12:.4g}") / 1e12)
        for fixed, slope in curve.lines
    )


def shown(band: Band | None) -> str:
    return "-" if band is None else f"{band.median * 100:.1f},{band.most * 100:.1f}"


def percent(band: Band | None) -> str:
    return "" if band is None else f"{band.median * 100:.0f} / {band.most * 100:.0f}"


def table(curves: dict[str, tuple[Curve, ...]]) -> list[str]:
    lines = [
        "| links | collective | "
        + " | ".join(f"{n}, small | {n}, large" for n in (2, 4, 8))
        + " | 4 from 2 and 8 |",
        "| --- | --- |" + " --- |" * 7,
    ]
    for machine, some in curves.items():
        for kind in KIND.values():
            own = {curve.devices: curve for curve in some if curve.kind == kind}
            bands = [
                band for n in (2, 4, 8) for band in (own[n].errors if n in own else (None,) * 2)
            ]
            cells = list(map(percent, bands))
            between = " · ".join(filter(None, map(percent, own[4].left_out)))
            lines.append(f"| {MACHINES[machine]} | {kind} | {' | '.join(cells)} | {between} |")
    return lines


def plot(points: list[tuple[str, str, float, float]]) -> str:
    """Draw measured against predicted, by hardware: a point is (kind, machine, x, y)."""
    machines, columns, step = list(dict.fromkeys(m for _, m, _, _ in points)), 3, 340
    panels = [
        f'<g transform="translate({place % columns * step},{place // columns * step})">\n'
        + panel(MACHINES[machine], [(k, p, m) for k, of, p, m in points if of == machine])
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


def summary(name: str, errors: list[tuple[float, float]]) -> str:
    every = [error for _, error in errors]
    large = [error for size, error in errors if size >= LARGE]
    cells = (f"{q * 100:.1f}" for some in (every, large) for q in np.quantile(some, (0.5, 0.9)))
    return f"| {name} | {len(every)} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    times = read(given.times)
    curves = {
        machine: fit_curves(rows, times.get(OTHER.get(machine, "")))
        for machine, rows in times.items()
    }
    print("\n".join([*starmap(exchange_row, curves.items()), ""]))
    points, errors = [], defaultdict(list)
    for machine, fitted in curves.items():
        for curve in fitted:
            print(row_of(machine, curve))
            for size, seconds in times[machine][curve.kind, curve.devices]:
                predicted = curve.seconds(size)
                points.append((curve.kind, machine, predicted, seconds))
                errors[MACHINES[machine]].append((size, abs(predicted / seconds - 1)))
            for size, seconds in times.get(OTHER.get(machine, ""), {}).get(
                (curve.kind, curve.devices), ()
            ):
                off = abs(curve.seconds(size) / seconds - 1)
                errors[f"{MACHINES[machine]}, asked of {OTHER[machine]}"].append((size, off))
    print("\n".join(["", *table(curves), ""]))
    print("| fit | times | median | 90th | from 1 MiB: median | 90th |\n" + "| --- " * 6 + "|")
    for name, pairs in errors.items():
        print(summary(name, pairs))
    if given.plot:
        given.plot.write_text(plot(points))


if __name__ == "__main__":
    main()
