"""Checks that a name map writes every target element exactly once and drops no source element.

Every tensor that the map names must exist. A placeholder ``{i}`` counts from 0 to the largest
number in the source, or to the size ``{i}``. Then each element must be in exactly one equation.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.errors import LayoutError
from shardspec.mesh.device_ids import whole_numbers
from shardspec.resharding.map_file import Binding, Side, filled, known_sizes, placeholders
from shardspec.resharding.name_map import (
    Equation,
    NameMap,
    Shape,
    bindings_of,
    equations_of,
    padding,
    target_shapes,
    unused_parts,
)
from shardspec.resharding.views import Factor, TensorView
from shardspec.text import Argument, first_of, shown

_SHOWN: Final = 3
_MAX_CELLS: Final = 1 << 24
"""Cells of the grid in which the views of a tensor are counted."""
_MAX_DIMS: Final = 63
"""Dims that numpy indexes by one array each."""

Index: TypeAlias = tuple[int, ...]
_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MapReport:
    """Result of checking a map."""

    equations: tuple[Equation, ...]
    problems: tuple[str, ...]
    """Reasons why the map is not total: names that do not exist, and elements of the target that
    are not written exactly once."""
    unused: tuple[str, ...]
    """Source tensors with elements that no rule uses."""

    def __bool__(self) -> bool:
        return not (self.problems or self.unused)

    def require_total(self) -> None:
        """Raise LayoutError with the first problems, if the map has any."""
        faults = []
        if self.problems:
            rest = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            faults.append(f"the map is not total: {self.problems[0]}{rest}")
        if self.unused:
            names = first_of([*map(shown, self.unused)], _SHOWN)
            faults.append(
                f"the map does not use {names}, or not all of it; correct the map, or drop tensors "
                "by name with "
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
    r"""Report the elements that a map does not write exactly once, and those that it loses.

    Every tensor that the map names must exist, and the map must name every tensor. An equation
    covers a product of sets of indices, one per dim; the proof compares these sets and shares no
    code with the moves of elements.

    Parameters
    ----------
    map_
        The map to check.
    source, target
        Name to global shape.
    drop
        Shell patterns of names of the source to drop.

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
    for name, shape in (*source.items(), *target.items()):
        if not isinstance(name, str):
            raise LayoutError(f"{shown(name)} is not the name of a tensor; give a string")
        if (
            not isinstance(shape, Sequence)
            or whole_numbers(shape) is None
            or min(shape, default=0) < 0
        ):
            raise LayoutError(f"{name!r} has shape {shown(shape)}; give sizes of 0 or more")
    return report_of(map_, source, target, dropped_by(drop, source))


def dropped_by(patterns: str | Sequence[str], source: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the tensors that match patterns; LayoutError if a pattern matches nothing.

    >>> dropped_by("*.bias", {"a.weight": (2,), "a.bias": (3,)})
    {'a.bias': (3,)}
    """
    dropped: dict[str, Shape] = {}
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        matching = {name: shape for name, shape in source.items() if fnmatchcase(name, pattern)}
        if not matching:
            first = ", ".join(map(shown, sorted(source)[:_SHOWN])) or "nothing: it is empty"
            raise LayoutError(
                f"no tensor to drop matches the pattern {shown(pattern)}; the names start with "
                f"{first}"
            )
        dropped |= matching
    return dropped


class Mapped(NamedTuple):
    """Names and shapes of the tensors that a map makes."""

    shapes: dict[str, Shape]
    """Target shapes by name."""
    dropped: dict[str, Shape]
    """Target tensors that are missing because all their sources are dropped."""
    report: MapReport


def apply_map(map_: NameMap, source: Mapping[str, Shape], dropped: Mapping[str, Shape]) -> Mapped:
    """Return the names and shapes that a map makes of a source without its `dropped` tensors."""
    every = target_shapes(map_, source)
    shapes = target_shapes(map_, source, without=dropped.keys()) if dropped else every
    behind = {name: shape for name, shape in every.items() if name not in shapes}
    return Mapped(shapes, behind, report_of(map_, source, shapes, dropped))


def report_of(
    map_: NameMap,
    source: Mapping[str, Shape],
    target: Mapping[str, Shape],
    dropped: Mapping[str, Shape],
) -> MapReport:
    """Check a map as `check_map` does; `source` also contains the `dropped` tensors."""
    bindings = bindings_of(map_, source)
    sought = [
        _Sought(side, place in map_.optional, bound)
        for place, ((side, _), bound) in enumerate(zip(map_.rules, bindings, strict=True))
    ]
    equations = tuple(e for e in equations_of(map_, source, target) if e.source not in dropped)
    written: dict[str, list[tuple[str, TensorView]]] = {name: [] for name in target}
    read: dict[str, list[TensorView]] = {name: [] for name in source if name not in dropped}
    for equation in equations:
        written[equation.target].append((equation.source, equation.view.target))
        read[equation.source].append(equation.view.source)
    for name, side in padding(map_, target):
        written[name].append(("padding", side))
    for name, side in unused_parts(map_, {name: source[name] for name in read}):
        read[name].append(side)
    problems = list(_missing(sought, known_sizes(map_.sizes), map_.sizes, map_.numbers))
    for name, parts in written.items():
        twice, empty = find_faults(target[name], tuple(side for _, side in parts))
        if twice is not None:
            first, second, *_ = (writer for writer, side in parts if covers(side, twice))
            problems.append(f"{name!r}: both {first!r} and {second!r} are written at index {twice}")
        elif empty is not None:
            problems.append(f"{name!r}: nothing is written at index {empty}")
    unused = (
        name
        for name, sides in read.items()
        if find_faults(source[name], tuple(sides)).hole is not None
    )
    return MapReport(equations, tuple(problems), tuple(unused))


class Faults(NamedTuple):
    """The first index that is written twice, and the first that is never written."""

    overlap: Index | None
    """Index that several views cover."""
    hole: Index | None
    """Index that no view covers."""


def covers(side: TensorView, index: Index) -> bool:
    """Return True if a view contains the element at an index."""
    for at, factors in zip(index, side.dims, strict=True):
        for factor in reversed(factors):
            at, place = divmod(at, factor.size)
            if not factor.start <= place < factor.start + factor.length:
                return False
    return True


@lru_cache(4096)  # layers are alike
def find_faults(shape: tuple[int, ...], sides: tuple[TensorView, ...]) -> Faults:
    """Return the first index in several of the views of a tensor, and the first in none.

    Each dim is cut wherever an interval of a view begins or ends. Every view then covers a cell
    fully or not at all, so one count per cell is enough.

    >>> halves = tuple(TensorView(((Factor(0, 4, lo, 3),),)) for lo in (0, 1))
    >>> find_faults((4,), halves)
    Faults(overlap=(1,), hole=None)
    """
    if 0 in shape:
        return Faults(None, None)
    if len(shape) > _MAX_DIMS:
        raise LayoutError(f"a tensor has {len(shape)} dims; maps take at most {_MAX_DIMS}")
    intervals = [[_intervals(factors) for factors in side.dims] for side in sides]
    edges = [
        _distinct(np.concatenate([[0, size], *(np.ravel(side[dim]) for side in intervals)]))
        for dim, size in enumerate(shape)
    ]
    cells = [len(each) - 1 for each in edges]
    if prod(cells) > _MAX_CELLS:
        raise LayoutError(
            f"{len(sides):,} equations split a tensor of {list(shape)} into too many parts to "
            "check; use fewer and larger parts"
        )
    counts = np.zeros(cells, np.uint32)
    for side in intervals:
        inside = []
        for at, (starts, stops) in zip(edges, side, strict=True):
            last = np.searchsorted(starts, at[:-1], "right")
            inside.append(at[:-1] < np.concatenate([[0], stops])[last])
        counts[np.ix_(*inside)] += 1

    def first(wrong: npt.NDArray[np.bool_]) -> Index | None:
        cell = np.unravel_index(int(wrong.argmax()), wrong.shape) if shape else ()
        index = tuple(int(at[place]) for at, place in zip(edges, cell, strict=True))
        return index if wrong[cell] else None

    return Faults(first(counts > 1), first(counts == 0))


def _distinct(numbers: _Ints) -> _Ints:
    """Return the distinct numbers in ascending order; fast for long sorted runs."""
    numbers = np.sort(numbers, kind="stable")
    distinct: _Ints = numbers[np.concatenate([[True], numbers[1:] != numbers[:-1]])]
    return distinct


def _intervals(factors: Sequence[Factor]) -> _Ints:
    """Return rows (starts, ends) of the intervals of a dim that a view covers, ascending."""
    starts, stops, width = np.array([0]), np.array([1]), 1
    for factor in reversed(factors):
        first = factor.start * width
        if not factor.length:
            return np.empty((2, 0), np.int64)
        if len(starts) == 1 and (starts[0], stops[0]) == (0, width):
            starts, stops = np.array([first]), np.array([first + factor.length * width])
        elif factor.length * len(starts) > _MAX_CELLS:
            raise LayoutError(
                "an equation splits a dim into too many parts to check; use larger parts"
            )
        else:
            steps = first + np.arange(factor.length) * width
            starts, stops = (np.add.outer(steps, each).ravel() for each in (starts, stops))
        width *= factor.size
    return np.stack([starts, stops])


class _Sought(NamedTuple):
    """A rule of a map, and the source tensors that its pattern matches, as placeholder numbers."""

    side: Side
    """Source side of the rule."""
    optional: bool
    """True if the source may lack the rule's tensors."""
    bindings: Sequence[Binding]


def _missing(
    rules: Sequence[_Sought],
    as_numbers: Mapping[str, int],
    sizes: Mapping[str, int | str],
    numbers: Mapping[str, Collection[int]] | None = None,
) -> Iterator[str]:
    """Yield a line for each rule that lacks a tensor, as "layers.3.w", or has one too many.

    Parameters
    ----------
    rules
        The rules, with the tensors that they match.
    as_numbers, sizes
        Sizes as numbers, and as in the map; ``{i}`` is the count of numbers of `i`.
    numbers
        Numbers of a placeholder, if these are not 0, 1, 2, …
    """
    counts: dict[str, int] = {}
    for rule in rules:
        for name in placeholders(rule.side[0]):
            counts.setdefault(name, 1)
        for binding in rule.bindings:
            for name, number in binding.items():
                counts[name] = max(counts.get(name, 1), number + 1)
    declared = {name: as_numbers[f"{{{name}}}"] for name in counts if f"{{{name}}}" in as_numbers}
    for rule in rules:
        for binding in rule.bindings:
            for name in declared.keys() & binding.keys():
                if binding[name] >= declared[name]:
                    yield (
                        f"the source has {_named(rule.side, binding)}, but {{{name}}} ends at "
                        f"{declared[name] - 1}, as {_origin(name, sizes)} is {declared[name]}"
                    )
                    return
    counts |= declared
    ranges: dict[str, Collection[int]] = {name: range(count) for name, count in counts.items()}
    ranges |= numbers or {}
    for rule in rules:
        if not rule.optional and (lost := _first_missing(rule, ranges)) is not None:
            yield f"the source lacks {_named(rule.side, lost)}, which the map names"


def _first_missing(rule: _Sought, every: Mapping[str, Collection[int]]) -> Binding | None:
    """Return the first combination of numbers in `every` without a tensor; None if all have one."""
    names = sorted(rule.bindings[0] if rule.bindings else placeholders(rule.side[0]))
    ranges = [every.get(name, range(1)) for name in names]
    if len(rule.bindings) == prod(map(len, ranges)):
        return None
    present = {tuple(binding[name] for name in names) for binding in rule.bindings}
    # Of n + 1 candidates, n present ones cannot be all, so n + 1 per range are enough.
    near = [[*islice(numbers, len(present) + 1)] for numbers in ranges]
    lost = next((numbers for numbers in product(*near) if numbers not in present), None)
    return None if lost is None else dict(zip(names, lost, strict=True))


def _named(side: Side, binding: Binding) -> str:
    """Return a tensor's name as text; for one row of a stacked tensor, also the row."""
    own = placeholders(side[0])
    rows = [f"{{{name}}} = {number}" for name, number in binding.items() if name not in own]
    return " at ".join([repr(filled(side[:1], binding)[0]), ", ".join(rows)][: 1 + bool(rows)])


def _origin(name: str, sizes: Mapping[str, int | str]) -> str:
    size = sizes[f"{{{name}}}"]
    return size if isinstance(size, str) else f"the size {{{name}}}"
