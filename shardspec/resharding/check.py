"""The proof that a name map is total: every element of the target is written exactly once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TypeAlias

from shardspec.errors import LayoutError
from shardspec.resharding.maps import Equation, NameMap, Shape
from shardspec.resharding.views import TensorView


@dataclass(frozen=True, slots=True)
class MapReport:
    """What a map does with every element."""

    equations: tuple[Equation, ...]
    problems: tuple[str, ...]
    """Why it is not total; nothing where every element of the target is written exactly once."""
    unused: tuple[str, ...]
    """Tensors of the source of which some elements go nowhere, and are not said to."""

    def __bool__(self) -> bool:
        return not self.problems

    def require_total(self) -> None:
        """Raise LayoutError, which tells the first problem, unless the map is total."""
        if self.problems:
            rest = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise LayoutError(f"the map is not total: {self.problems[0]}{rest}")


def check_map(map_: NameMap, source: Mapping[str, Shape], target: Mapping[str, Shape]) -> MapReport:
    r"""Prove that a map writes every element of the target exactly once.

    Indices along each dim that an equation covers are compared as sets; an equation covers the
    product of these. So the proof shares nothing with how elements are moved.

    Parameters
    ----------
    map_
        The map.
    source, target
        Name to global shape.

    Raises
    ------
    LayoutError
        If a view does not fit a tensor.

    Examples
    --------
    >>> map_ = NameMap.parse('[[map]]\nsource = "a"\ntarget = ["b", "x", "x[:2]"]')
    >>> check_map(map_, {"a": (2,)}, {"b": (3,)}).problems
    ("'b': nothing is written at index (2,)",)
    """
    equations = map_.equations(source, target)
    written: dict[str, list[tuple[str, TensorView]]] = {name: [] for name in target}
    read: dict[str, list[TensorView]] = {name: [] for name in source}
    for equation in equations:
        written[equation.target].append((equation.source, equation.view.target))
        read[equation.source].append(equation.view.source)
    for name, side in map_.padding(target):
        written[name].append(("padding", side))
    for name, side in map_.dropped(source):
        read[name].append(side)
    problems = [
        problem for name in target for problem in _not_once(name, target[name], written[name])
    ]
    unused = tuple(name for name in source if _covered(read[name]) < prod(source[name]))
    return MapReport(tuple(equations), tuple(problems), unused)


Cover: TypeAlias = tuple[int, ...]
"""Per dim the indices that something covers, as bits; it covers the product of these."""


def _size(cover: Cover) -> int:
    return prod(bits.bit_count() for bits in cover)


def _not_once(name: str, shape: Shape, sides: Sequence[tuple[str, TensorView]]) -> Iterator[str]:
    covers = [(by, side.covered()) for by, side in sides]
    for (one, a), (other, b) in combinations(covers, 2):
        both = [x & y for x, y in zip(a, b, strict=True)]
        if all(both) and 0 not in shape:
            index = tuple((bits & -bits).bit_length() - 1 for bits in both)
            yield f"{name!r}: both {one!r} and {other!r} are written at index {index}"
            return
    if sum(_size(cover) for _, cover in covers) < prod(shape):
        index = _first_hole(shape, [cover for _, cover in covers])
        yield f"{name!r}: nothing is written at index {index}"


def _first_hole(shape: Shape, covers: Sequence[Cover]) -> Shape:
    """Return the first index, in row-major order, that no product of index sets has."""
    index: list[int] = []
    for dim, size in enumerate(shape):
        for at in range(size):
            here = [cover for cover in covers if cover[dim] >> at & 1]
            if sum(_size(cover[dim + 1 :]) for cover in here) < prod(shape[dim + 1 :]):
                index.append(at)
                covers = here
                break
    return tuple(index)


def _covered(sides: Sequence[TensorView]) -> int:
    """Return how many elements are in any of some parts."""
    disjoint: list[Cover] = []
    for cover in {side.covered() for side in sides}:
        pieces = [cover]
        for other in disjoint:
            pieces = [rest for piece in pieces for rest in _without(piece, other)]
        disjoint += pieces
    return sum(map(_size, disjoint))


def _without(cover: Cover, other: Cover) -> Iterator[Cover]:
    """Yield what is left of a product of index sets without another one, as such products."""
    if not all(a & b for a, b in zip(cover, other, strict=True)):
        yield cover
        return
    kept: Cover = ()
    for dim, (a, b) in enumerate(zip(cover, other, strict=True)):
        if a & ~b:
            yield (*kept, a & ~b, *cover[dim + 1 :])
        kept = (*kept, a & b)
