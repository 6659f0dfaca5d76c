"""A checkpoint under the names and shapes of another model, by a name map; nothing is copied.

An equation between views says where in a source tensor the elements of a target lie. So a stored
box of the source is a few boxes of the target, each with strides of its own in the same file, and
whatever reads checkpoints reads the mapped one.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import (
    Catalog,
    LazyTensorCache,
    OpaqueValue,
    StoredBox,
    StoredTensor,
)
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.resharding.check import check_map
from shardspec.resharding.maps import Equation, NameMap
from shardspec.resharding.views import Factor, TensorView, View
from shardspec.text import shown

__all__ = ["Names", "mapped"]

_ZEROS: Final = Path(__file__).with_name("zeros.bin")
"""As many bytes as the widest element has, all zero: what padding is read from."""

Names: TypeAlias = NameMap | Mapping[str, str] | Sequence[NameMap]
"""A map, or several to be taken one after the other, or new names; others are kept."""


def mapped(source: Catalog, names: Names | None) -> Catalog:
    """Return a checkpoint as what a map makes of it; as it is without one.

    Raises
    ------
    LayoutError
        If the map is not total for these tensors, mixes dtypes, or names none of them, or a tensor
        is stored with a reduction pending.
    """
    if names is None:
        return source
    given: object = names
    if isinstance(given, str):
        raise LayoutError(f"names={shown(given)} is text; give a map: load_map makes one of a name")
    if isinstance(names, Sequence):
        for each in names:
            source = mapped(source, each)
        return source
    if isinstance(names, NameMap):
        return _MappedCatalog(source, names)
    for name in names:
        if name not in source.names:
            raise LayoutError(f"names= maps {shown(name)}, which {source.directory} lacks")
    pairs = ((name, names.get(name, name)) for name in source.names)
    return _MappedCatalog(source, NameMap(tuple(((old,), (new,)) for old, new in pairs)))


class _MappedCatalog(Catalog):
    """A checkpoint as a map makes it; boxes are made when they are asked for."""

    def __init__(self, source: Catalog, names: NameMap) -> None:
        outlines = {name: source.outline(name) for name in source.names}
        shapes = {name: outline.shape for name, outline in outlines.items()}
        found = names.target_shapes(shapes)
        report = check_map(names, shapes, found)
        if report.problems:
            rest = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
            raise LayoutError(f"the map is not total: {report.problems[0]}{rest}")
        if not report.equations:
            first = ", ".join(map(shown, source.names[:3]))
            raise LayoutError(
                f"the map names no tensor of {source.directory}, whose names start with {first}"
            )
        numbered = [one[0] for one, other in names.rules if "{" in f"{one[0]} {other[0]}"]
        plain = {one[0] for one, _ in names.rules} - set(numbered)
        if numbered and report.unused and {e.source for e in report.equations} <= plain:
            raise LayoutError(
                f"the map names {shown(numbered[0])} and others with numbers, of which "
                f"{source.directory} has none; it has {shown(report.unused[0])}"
            )
        self._equations: dict[str, list[Equation]] = {}
        self._dtypes: dict[str, str] = {}
        for equation in report.equations:
            outline = outlines[equation.source]
            dtype = self._dtypes.setdefault(equation.target, outline.dtype)
            if dtype != outline.dtype:
                raise LayoutError(
                    f"the map makes {equation.target!r} of {dtype} and of {outline.dtype}, that of "
                    f"{equation.source!r}; cast one of them first"
                )
            if outline.pending:
                raise LayoutError(
                    f"{equation.source!r} is stored with a reduction pending; merge or reshard "
                    "the checkpoint first, which finishes it"
                )
            self._equations.setdefault(equation.target, []).append(equation)
        self._padding: dict[str, list[TensorView]] = {}
        for target, side in names.padding(found):
            if target not in self._equations:
                raise LayoutError(f"the map fills {target!r} with zeros alone; leave it out")
            self._padding.setdefault(target, []).append(side)
        left = {name: OpaqueValue("a tensor that the map does not use") for name in report.unused}
        super().__init__(
            source.format,
            source.directory,
            self._equations,
            source.files,
            source.mesh,
            {**source.extras, **left},
        )
        self.snapshot = source.snapshot
        self._source = source
        self._shapes = found
        self._tensors = LazyTensorCache(self._look_up)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor of the target, whose boxes are parts of stored ones."""
        return self._tensors(name)

    def _look_up(self, name: str) -> StoredTensor:
        boxes = tuple(
            part
            for equation in self._equations[name]
            for stored in self._source.tensor(equation.source).boxes
            for part in _boxes(equation.view, stored, item_bytes(self._dtypes[name]))
        )
        zeros = tuple(part for side in self._padding.get(name, ()) for part in _zeros(side))
        return StoredTensor(name, self._shapes[name], self._dtypes[name], None, (), boxes + zeros)


def _boxes(view: View, stored: StoredBox, width: int) -> Iterator[StoredBox]:
    """Yield what a stored box of the source is of the target."""
    strides = stored.strides or _row_major(box_shape(stored.box), width)
    steps = view.source.strides(strides, len(view.shape))
    held = [[side] for side in stored.box]
    for box in view.source.boxes(stored.box, len(view.shape)):
        first = stored.offset + view.source.offset(strides, held, [lo for lo, _ in box])
        dims = [list(_intervals(factors, box, steps)) for factors in view.target.dims]
        for sides in product(*dims):
            part = tuple((lo, lo + length) for lo, length, _, _ in sides)
            by = tuple(step for _, _, step, _ in sides)
            shape = box_shape(part)
            plain = _row_major(shape, width)
            flat = all(n == 1 or a == b for n, a, b in zip(shape, by, plain, strict=True))
            offset = first + sum(before for *_, before in sides)
            yield StoredBox(
                part, (), stored.rank, stored.path, offset, stored.digest, None if flat else by
            )


def _zeros(side: TensorView) -> Iterator[StoredBox]:
    """Yield what of a tensor is padding, all of it the same zeros of a file."""
    factors = [factor for dim in side.dims for factor in dim]
    box = tuple((0, f.length) for f in sorted(factors, key=lambda f: f.axis))
    nothing = [0] * len(box)
    for sides in product(*(list(_intervals(dim, box, nothing)) for dim in side.dims)):
        part = tuple((lo, lo + length) for lo, length, _, _ in sides)
        if box_size(part):
            yield StoredBox(part, (), 0, _ZEROS, 0, None, (0,) * len(part))


def _intervals(
    factors: Sequence[Factor], box: Box, steps: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the intervals of one dim of the target that a box of the view is.

    Yields
    ------
    tuple
        The first index, how many there are, the bytes in the file from one to the next, and how
        many bytes precede the first in the box of the view.
    """
    outer = list(factors)
    start, length, step, weight = 0, 1, 0, 1
    # The minor factors are one interval as long as all of each is there, at even steps.
    while outer:
        factor = outer[-1]
        lo, hi = box[factor.axis]
        count, size = hi - lo, length
        if size != weight or (count > 1 < size and steps[factor.axis] != step * size):
            break
        if count > 1 and size == 1:
            step = steps[factor.axis]
        start += (factor.start + lo) * weight
        length *= count
        weight *= factor.size
        outer.pop()
    weights = [weight * prod(f.size for f in outer[at + 1 :]) for at in range(len(outer))]
    for places in product(*(range(*box[factor.axis]) for factor in outer)):
        found = list(zip(places, outer, weights, strict=True))
        index = sum((factor.start + place) * by for place, factor, by in found)
        before = sum((place - box[f.axis][0]) * steps[f.axis] for place, f, _ in found)
        yield start + index, length, step, before


def _row_major(shape: Sequence[int], width: int) -> tuple[int, ...]:
    return tuple(width * prod(shape[dim + 1 :]) for dim in range(len(shape)))
