"""Whether a map writes all of a target once, and loses nothing of a source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, NamedTuple

from shardspec.errors import LayoutError
from shardspec.resharding.covers import covers, first_hole, first_overlap
from shardspec.resharding.name_map import Equation, NameMap, Shape
from shardspec.resharding.presence import Sought, missing
from shardspec.resharding.views import TensorView
from shardspec.text import Argument, first_of, shown

_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class MapReport:
    """What a map does with every element."""

    equations: tuple[Equation, ...]
    problems: tuple[str, ...]
    """Why it is not total; empty if all that it names exists, and every element of the target is
    written exactly once."""
    unused: tuple[str, ...]
    """Tensors of the source some of whose elements go nowhere by mistake."""

    def __bool__(self) -> bool:
        return not (self.problems or self.unused)

    def require_total(self) -> None:
        """Raise LayoutError, which names the first problems, unless the report has none."""
        faults = []
        if self.problems:
            rest = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            faults.append(f"the map is not total: {self.problems[0]}{rest}")
        if self.unused:
            names = first_of([*map(shown, self.unused)], _SHOWN)
            faults.append(
                f"the map has no use for {names}, in whole or in part; take a map that has, or "
                "leave tensors behind by name with "
            )
        if faults:
            raise LayoutError("; ".join(faults), *[Argument("drop")] * bool(self.unused))


def check_map(
    map_: NameMap,
    source: Mapping[str, Shape],
    target: Mapping[str, Shape],
    *,
    drop: str | Sequence[str] = (),
) -> MapReport:
    r"""Prove that a map writes every element of the target exactly once, and loses nothing.

    All that the map names must exist, and all that exists must be named. Indices along each
    dim that an equation covers are compared as sets; an equation covers the product of these. So
    the proof shares nothing with how elements are moved.

    Parameters
    ----------
    map_
        The map.
    source, target
        Name to global shape.
    drop
        Shell patterns of names of the source that are left behind.

    Raises
    ------
    LayoutError
        If a view does not fit a tensor, or a pattern matches nothing.

    Examples
    --------
    >>> map_ = NameMap.parse('[[map]]\nsource = "a"\ntarget = ["b", "x", "x[:2]"]')
    >>> check_map(map_, {"a": (2,)}, {"b": (3,)}).problems
    ("'b': nothing is written at index (2,)",)
    """
    return report_of(map_, source, target, dropped_by(drop, source))


def dropped_by(patterns: str | Sequence[str], source: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the tensors that patterns leave behind; LayoutError if one matches nothing."""
    dropped: dict[str, Shape] = {}
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        alike = {name: shape for name, shape in source.items() if fnmatchcase(name, pattern)}
        if not alike:
            first = ", ".join(map(shown, sorted(source)[:_SHOWN])) or "nothing: it is empty"
            raise LayoutError(
                f"nothing matches the pattern {shown(pattern)} of what is dropped; the names "
                f"start with {first}"
            )
        dropped |= alike
    return dropped


class Mapped(NamedTuple):
    """What a map makes of a source."""

    shapes: dict[str, Shape]
    """Of the target, by name."""
    dropped: dict[str, Shape]
    """Tensors of the target that are left behind, since all that would make them was."""
    report: MapReport


def apply_map(map_: NameMap, source: Mapping[str, Shape], dropped: Mapping[str, Shape]) -> Mapped:
    """Return what a map makes of a source, some of whose tensors are left behind."""
    every = map_.target_shapes(source)
    shapes = map_.target_shapes(source, without=dropped.keys()) if dropped else every
    behind = {name: shape for name, shape in every.items() if name not in shapes}
    return Mapped(shapes, behind, report_of(map_, source, shapes, dropped))


def report_of(
    map_: NameMap,
    source: Mapping[str, Shape],
    target: Mapping[str, Shape],
    dropped: Mapping[str, Shape],
) -> MapReport:
    """Check a map; what is dropped is in the source too."""
    bindings = map_.bindings(source)
    sought = [
        Sought(side, map_.optional.get(place), bound)
        for place, ((side, _), bound) in enumerate(zip(map_.rules, bindings, strict=True))
    ]
    equations = tuple(e for e in map_.equations(source, target) if e.source not in dropped)
    written: dict[str, list[tuple[str, TensorView]]] = {name: [] for name in target}
    read: dict[str, list[TensorView]] = {name: [] for name in source if name not in dropped}
    for equation in equations:
        written[equation.target].append((equation.source, equation.view.target))
        read[equation.source].append(equation.view.source)
    for name, side in map_.padding(target):
        written[name].append(("padding", side))
    for name, side in map_.dropped({name: source[name] for name in read}):
        read[name].append(side)
    # Layers are alike.
    overlap, hole = lru_cache(4096)(first_overlap), lru_cache(4096)(first_hole)
    problems = list(missing(sought, map_.known_sizes(), map_.sizes, map_.numbers))
    for name, parts in written.items():
        sides = tuple(side for _, side in parts)
        if (twice := overlap(target[name], sides)) is not None:
            first, second, *_ = (writer for writer, side in parts if covers(side, twice))
            problems.append(f"{name!r}: both {first!r} and {second!r} are written at index {twice}")
        elif (empty := hole(target[name], sides)) is not None:
            problems.append(f"{name!r}: nothing is written at index {empty}")
    unused = (name for name, sides in read.items() if hole(source[name], tuple(sides)) is not None)
    return MapReport(equations, tuple(problems), tuple(unused))
