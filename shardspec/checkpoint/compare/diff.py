"""Compares two checkpoints tensor by tensor, and value by value."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import PurePath
from typing import Any, Final, Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import box_size
from shardspec.checkpoint.catalog import (
    Catalog,
    OpaqueValue,
    StoredTensor,
    is_plain_entry,
    opaque_parts,
    whole_box,
)
from shardspec.checkpoint.compare.coverage import (
    check_replicas,
    check_tiling,
    element_index,
    memoize_by_boxes,
    read_both,
)
from shardspec.checkpoint.compare.inspect import other_text
from shardspec.checkpoint.convert.copy import (
    Progress,
)
from shardspec.checkpoint.convert.numeric import numbers
from shardspec.checkpoint.convert.select import Choice, Patterns, Renames, renamed_names, select
from shardspec.checkpoint.formats import format_called
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.state.state_dict import saved_leaves
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.dtypes import is_floating, packed
from shardspec.errors import CheckpointError
from shardspec.layout.picture import ids_text
from shardspec.resharding.state import dotted_name

_MOST_TEXT: Final = 60
"""Characters shown of a value that is not a tensor."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor or value that differs between two checkpoints."""

    name: str
    problem: str
    """The difference in words, after the name: ``has shape [2] in the first, ...``."""
    index: tuple[int, ...] | None = None
    """First element that differs, in row-major order; None if shapes, dtypes or names differ."""
    ranks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Ranks whose boxes contain that element, in each checkpoint."""
    kind: Literal["tensor", "value"] = "tensor"
    one_side: bool = False
    """True if only one of the checkpoints has this tensor or value."""
    extent: "DiffExtent | None" = None
    """Size of the difference; None if shapes, dtypes or names differ."""


@dataclass(frozen=True, slots=True)
class DiffExtent:
    """Number of elements that differ beyond the tolerances, and the largest differences."""

    elements: int
    """Number of elements of the tensor."""
    differing: int
    max_abs: float
    """Largest absolute difference, ignoring NaN."""
    max_rel: float
    """Largest difference relative to the second number; infinite where that is 0."""
    nans: tuple[int, int]
    """Number of differing elements that are NaN, in each checkpoint."""

    def __str__(self) -> str:
        text = (
            f"{self.differing:,} of {self.elements:,} elements differ"
            f"{'s' if self.differing == 1 else ''}, by up to {amount_text(self)}"
        )
        if any(self.nans):
            text += f", NaN: {self.nans[0]:,} in the first, {self.nans[1]:,} in the second"
        return text


def amount_text(extent: DiffExtent) -> str:
    """Return the largest differences as text.

    >>> amount_text(DiffExtent(6, 1, 0.25, 0.01, (0, 0)))
    '0.25 (relative 0.01)'
    """
    return f"{extent.max_abs:.3g} (relative {extent.max_rel:.3g})"


def total_extent(extents: Iterable[DiffExtent]) -> DiffExtent:
    """Return the `DiffExtent` of several tensors together.

    >>> total_extent([DiffExtent(6, 1, 0.25, 0.01, (0, 0)), DiffExtent(4, 2, 3.0, 0.5, (1, 0))])
    DiffExtent(elements=10, differing=3, max_abs=3.0, max_rel=0.5, nans=(1, 0))
    """
    every = list(extents)
    return DiffExtent(
        sum(extent.elements for extent in every),
        sum(extent.differing for extent in every),
        max((extent.max_abs for extent in every), default=0.0),
        max((extent.max_rel for extent in every), default=0.0),
        (sum(extent.nans[0] for extent in every), sum(extent.nans[1] for extent in every)),
    )


def names_to_compare(a: Catalog, b: Catalog, choice: Choice) -> tuple[dict[str, str], set[str]]:
    """Return the tensors to compare: new name -> name in `a`, and the names in `b`."""
    chosen = {tensor.name: tensor.source for tensor in select(a, choice)}
    return chosen, {name for name in b.names if name in chosen or choice.wants(name)}


def diff_checkpoints(
    a: PurePath | str | Catalog,
    b: PurePath | str | Catalog,
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    rename: Renames = (),
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress | None = None,
) -> Iterator[Difference]:
    """Yield every tensor that differs, by name; options as in `merge` select tensors of `a`.

    Then yield the plain values and pickled objects that differ, if both formats store such
    entries. Pickled objects are compared without running them.

    Without tolerances bits are compared: NaNs with equal bits are equal, 0 and -0 are not. With a
    tolerance the test is ``|x - y| <= atol + rtol * |y|`` in float64, with ``x - y`` exact for
    integers. Then every NaN equals every NaN, an infinity equals only itself, and floating point
    dtypes may differ. `progress` is called with bytes of the first checkpoint.

    >>> import tempfile, torch
    >>> from shardspec import save_sharded
    >>> paths = [tempfile.mkdtemp() for _ in range(2)]
    >>> for path, last in zip(paths, (3.0, 5.0)):
    ...     save_sharded({"w": torch.tensor([1.0, last])}, path)
    >>> [(found.name, found.index, found.extent.max_abs) for found in diff_checkpoints(*paths)]
    [('w', (1,), 2.0)]
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not (isfinite(value) and value >= 0):
            raise CheckpointError(f"{name} {value!r} is not a tolerance; give a number from 0")
    first, second = as_catalog(a), as_catalog(b)
    choice = Choice(include=include, exclude=exclude, rename=rename)
    old, others = names_to_compare(first, second, choice)
    sizes = {name: first.outline(source).num_bytes for name, source in old.items()}
    total, done = sum(sizes.values()), 0

    def compared(num_bytes: int) -> None:
        if progress is not None:
            progress(done + num_bytes, total)

    check = memoize_by_boxes(check_tiling)  # many tensors are sharded alike
    for outline in (*map(first.outline, old.values()), *map(second.outline, others)):
        check(outline)
    with OpenFiles() as files:
        for name in sorted(old.keys() | others):
            difference: Difference | None
            if name in old and name in others:
                x, y = first.tensor(old[name]), second.tensor(name)
                difference = _difference(name, x, y, atol, rtol, files, compared)
            else:
                where = (first if name in old else second).directory
                difference = Difference(name, f"is only in {where}", one_side=True)
            if difference is not None:
                yield difference
            done += sizes.get(name, 0)
            compared(0)
    yield from _different_values(first, second, choice, atol, rtol)
    first.check_unchanged()
    second.check_unchanged()


def values_to_compare(
    a: Catalog, b: Catalog, choice: Choice
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the entries to compare that are not tensors, of both checkpoints, by name in `b`."""
    if "tensors" in _keeps_of(a, b):
        return {}, {}
    names, _ = renamed_names([name for name in a.extras if choice.wants(name)], choice.rename)
    first = {new: a.extras[name] for name, new in names.items()}
    second = {n: value for n, value in b.extras.items() if n in first or choice.wants(n)}
    return _entries(first), _entries(second)


def _keeps_of(*sources: Catalog) -> set[str]:
    """Return the kinds of entries that the formats of all checkpoints keep; see `Format.keeps`."""
    formats = (format_called(source.format) for source in sources)
    return {"values" if format is None else format.keeps for format in formats}


def _entries(values: Mapping[str, object]) -> dict[str, object]:
    """Return entries by dotted name, without files that a checkpoint only refers to."""
    return {
        dotted_name(path): leaf
        for name, value in values.items()
        if not (isinstance(value, OpaqueValue) and not value.inside)
        for path, leaf in saved_leaves(value, (name,))
    }


def _different_values(
    a: Catalog, b: Catalog, choice: Choice, atol: float, rtol: float
) -> Iterator[Difference]:
    first, second = values_to_compare(a, b, choice)
    objects = "notes" not in _keeps_of(a, b)
    for name in sorted(first.keys() | second.keys()):
        problem = ""
        one_side = name not in first or name not in second
        if one_side:
            if not (objects or is_plain_entry(first.get(name, second.get(name)))):
                continue
            problem = f"is only in {(a if name in first else b).directory}"
        elif not _are_equal(first[name], second[name], atol, rtol):
            texts = [other_text(of[name], _MOST_TEXT) for of in (first, second)]
            problem = f"is {texts[0]} in the first, {texts[1]} in the second"
            parts = (*opaque_parts(first[name]), *opaque_parts(second[name]))
            if texts[0] == texts[1]:
                problem = f"is {texts[0]} in both, but of other bytes"
            if any(part.digest is None for part in parts):
                problem += ", which cannot be compared; exclude it"
        if problem:
            yield Difference(name, problem, kind="value", one_side=one_side)


def _are_equal(x: object, y: object, atol: float, rtol: float) -> bool:
    """Return True if two values are equal within tolerances; without tolerances, bit by bit."""
    if (atol or rtol) and _is_number(x) and _is_number(y):
        with suppress(OverflowError):  # an integer may be too large for a float
            near = _close(np.array([float(x)]), np.array([float(y)]), atol, rtol)
            return x == y or bool(near.all())
    if type(x) is not type(y):
        return False
    match x, y:
        case OpaqueValue(), OpaqueValue():
            return x.digest == y.digest is not None
        case float(), float():
            return repr(x) == repr(y)
        case dict(), dict():
            return x.keys() == y.keys() and all(_are_equal(x[k], y[k], atol, rtol) for k in x)
        case list() | tuple(), list() | tuple():
            pairs = zip(x, y, strict=False)
            return len(x) == len(y) and all(_are_equal(a, b, atol, rtol) for a, b in pairs)
    return x == y


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _difference(
    name: str,
    x: StoredTensor,
    y: StoredTensor,
    atol: float,
    rtol: float,
    files: OpenFiles,
    compared: Callable[[int], None],
) -> Difference | None:
    """Return how two tensors differ, None if they are equal; pass the bytes read to `compared`."""
    if x.shape != y.shape:
        shapes = f"{list(x.shape)} in the first, {list(y.shape)} in the second"
        return Difference(name, f"has shape {shapes}")
    if x.dtype != y.dtype and not ((atol or rtol) and _is_real(x.dtype) and _is_real(y.dtype)):
        return Difference(name, f"is {x.dtype} in the first, {y.dtype} in the second")
    for tensor in (x, y):
        for group in check_tiling(tensor):
            check_replicas(tensor, group, files, trust_digests=True)
    done = 0
    first = ""
    index: tuple[int, ...] = ()
    extents: list[DiffExtent] = []
    for box, *both in read_both(x, y, whole_box(x.shape), files):
        done += len(both[0])
        compared(done)
        if x.dtype == y.dtype and both[0].tobytes() == both[1].tobytes():
            continue
        raw = a, b = [np.frombuffer(of, np.uint8).reshape(box_size(box), -1) for of in both]
        differs = (a != b).any(1) if x.dtype == y.dtype else np.ones(len(a), np.bool_)
        if atol or rtol:
            numbers_of = numbers(a.reshape(-1), x.dtype), numbers(b.reshape(-1), y.dtype)
            differs &= ~_close(*numbers_of, atol, rtol)
        if not differs.any():
            continue
        if not first:
            place = int(differs.argmax())
            index = element_index(box, place)
            first = _values_text(x, y, [of[place] for of in raw])
        extents.append(_extent(x, y, a[differs], b[differs]))
    if not extents:
        return None
    extent = replace(total_extent(extents), elements=prod(x.shape))
    ranks = _holders(x, index), _holders(y, index)
    holders = [
        f" (rank{'s' * (len(on) > 1)} {ids_text(on)})" if len(tensor.boxes) > 1 else ""
        for tensor, on in zip((x, y), ranks, strict=True)
    ]
    text = f"differs first at index {list(index)}: {first.format(*holders)}; {extent}"
    return Difference(name, text, index, ranks, extent=extent)


def _values_text(x: StoredTensor, y: StoredTensor, raw: Sequence[NDArray[np.uint8]]) -> str:
    """Return one element's values in `x` and `y` as text, with a ``{}`` for the ranks of each."""
    values = [
        repr(numbers(of, tensor.dtype)[0].item()) for of, tensor in zip(raw, (x, y), strict=True)
    ]
    if values[0] == values[1]:
        bits = (of[::-1].tobytes().hex() for of in raw)
        values = [f"{value} of bits 0x{of}" for value, of in zip(values, bits, strict=True)]
    return f"{values[0]} in the first{{}}, {values[1]} in the second{{}}"


def _extent(
    x: StoredTensor, y: StoredTensor, a: NDArray[np.uint8], b: NDArray[np.uint8]
) -> DiffExtent:
    """Return how far elements of `x` and `y` differ, given their bytes `a` and `b`."""
    first, second = numbers(a.reshape(-1), x.dtype), numbers(b.reshape(-1), y.dtype)
    distances, sizes = _distances(first, second)
    nans = first != first, second != second
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        relative = np.where(distances == 0, 0.0, distances / sizes)
    numeric = ~(nans[0] | nans[1])
    relative = np.where(np.isnan(relative), np.inf, relative)  # between infinities
    return DiffExtent(
        len(a),
        len(a),
        float(distances[numeric].max(initial=0.0)),
        float(relative[numeric].max(initial=0.0)),
        (int(nans[0].sum()), int(nans[1].sum())),
    )


def _is_real(dtype: str) -> bool:
    return is_floating(dtype) and not dtype.startswith("complex") and packed(dtype) == 1


def _holders(tensor: StoredTensor, index: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose boxes contain the element at an index."""
    ranks = {
        stored.rank
        for stored in tensor.boxes
        if all(lo <= at < hi for at, (lo, hi) in zip(index, stored.box, strict=True))
    }
    return tuple(sorted(ranks))


def _close(x: NDArray[Any], y: NDArray[Any], atol: float, rtol: float) -> NDArray[np.bool_]:
    distances, sizes = _distances(x, y)
    with np.errstate(invalid="ignore", over="ignore"):
        within: NDArray[np.bool_] = np.isfinite(sizes) & (distances <= atol + rtol * sizes)
        same: NDArray[np.bool_] = (x == y) | ((x != x) & (y != y))
    return within | same


def _distances(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return |x - y| and |y| of each pair of elements, in float64."""
    if x.dtype.kind in "iu":
        # float64 cannot tell 2**53 from 2**53 + 1. Unsigned, a difference is right modulo 2**64.
        a, b = x.astype(np.uint64), y.astype(np.uint64)
        return np.where(x > y, a - b, b - a).astype(np.float64), np.abs(y.astype(np.float64))
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(x.astype(wide) - y.astype(wide)), np.abs(y.astype(wide))
