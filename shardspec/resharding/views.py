"""Parses views: texts such as ``"(g q d) c"`` that split the dims of a tensor into named factors.

This view splits dim 0 into the factors `g`, `q` and `d`, as in einops. A view of a source and a
view of a target with the same names are an equation: the element at indices ``g, q, d, c`` of the
source equals the element at these indices of the target. Equations express fusing, splitting,
stacking, transposing and padding.

An index of a dim is a weighted sum of indices of the view. So a box of a tensor is a few boxes of
the view, and a box of the view is a strided part of a tensor.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, intersect, local_index, row_major_boxes
from shardspec.errors import LayoutError, SpecSyntaxError
from shardspec.text import shown

MAX_SIZE: Final = 2**63 - 1
"""Maximum elements of a tensor, and so the largest size."""
MOST_PIECES: Final = 2**20
"""Maximum pieces of a tensor, each an interval of a file at even steps."""


class Factor(NamedTuple):
    """One factor of a dim: `g` in "(g q) c", or a slice of it."""

    axis: int
    """Axis of the view."""
    size: int
    """Size of the factor in the tensor."""
    start: int
    """First index that the view covers."""
    length: int
    """Number of indices that the view covers."""


class TensorView(NamedTuple):
    """The factors of each dim of a tensor, major first: one side of an equation."""

    dims: tuple[tuple[Factor, ...], ...]

    def boxes(self, box: Box, axes: int) -> list[Box]:
        """Return the boxes of a view of `axes` axes that a box of the tensor contains.

        >>> side = TensorView(((Factor(0, 2, 0, 2), Factor(1, 4, 1, 2)),))
        >>> side.boxes(((2, 8),), 2)
        [((0, 1), (1, 2)), ((1, 2), (0, 2))]
        """
        choices = []
        for (lo, hi), factors in zip(box, self.dims, strict=True):
            choices.append(_parts_of(factors, lo, hi))
            if not choices[-1]:
                return []
        boxes = []
        for chosen in product(*choices):
            sides = zip(chain(*self.dims), chain(*chosen), strict=True)
            intervals = {f.axis: (lo - f.start, hi - f.start) for f, (lo, hi) in sides}
            boxes.append(tuple(intervals.get(axis, (0, 1)) for axis in range(axes)))
        return boxes

    def in_memory(
        self,
        strides: Sequence[int],
        intervals: Sequence[Sequence[tuple[int, int]]],
        corner: Sequence[int],
    ) -> tuple[tuple[int, ...], int]:
        """Return a shard's strides along the axes of the view, and the offset of element `corner`.

        `strides` are steps in the memory of a shard, `intervals` its indices along each dim.
        """
        steps, at = [0] * len(corner), 0
        for stride, indices, factors in zip(strides, intervals, self.dims, strict=True):
            index, width = 0, 1
            for factor in reversed(factors):
                steps[factor.axis] = stride * width
                index += (factor.start + corner[factor.axis]) * width
                width *= factor.size
            at += local_index(indices, index) * stride
        return tuple(steps), at


@lru_cache(maxsize=65536)
def _parts_of(factors: tuple[Factor, ...], lo: int, hi: int) -> list[Box]:
    """Split indices lo to hi of a dim into boxes of its factors: 2:8 of (2, 4) gives two boxes."""
    reach = tuple((f.start, f.start + f.length) for f in factors)
    parts = row_major_boxes([f.size for f in factors], lo, hi)
    return [both for part in parts if (both := intersect(part, reach)) is not None]


class View(NamedTuple):
    """An equation between two tensors: elements with the same index in the view are equal."""

    shape: tuple[int, ...]
    """Sizes of the axes of the view."""
    source: TensorView
    target: TensorView


def identity_view(shape: Sequence[int]) -> View:
    """Return the view that maps each element to itself.

    >>> identity_view((2,)).source
    TensorView(dims=((Factor(axis=0, size=2, start=0, length=2),),))
    """
    side = TensorView(tuple((Factor(axis, n, 0, n),) for axis, n in enumerate(shape)))
    return View(tuple(shape), side, side)


Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""Per dim the names of its factors."""
_DIM: Final = re.compile(r"\s*(?:([A-Za-z_]\w*)|\(([\w\s]*)\)|(.+))\s*", re.DOTALL)
_SLICE: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*\[([^\]:]*)(?:(:)([^\]:]*))?\]\s*")
_OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def parse_view(text: str) -> Dims:
    """Split a view into the names of factors per dim; SpecSyntaxError shows a mistake's place.

    >>> parse_view("(g q d) c")
    (('g', 'q', 'd'), ('c',))
    """
    dims = []
    for match in _DIM.finditer(text.rstrip()):
        dims.append(tuple((match[1] or match[2] or "").split()))
        if match[3] or any(name[0].isdecimal() for name in dims[-1]):
            rest = text[match.start() :].lstrip()
            problem = "names of factors and pairs of parentheses are expected"
            if rest[0] == ")":
                problem = "this parenthesis has no partner"
            elif rest[0] == "(" and ")" not in rest:
                problem = "a parenthesis is not closed"
            raise SpecSyntaxError(problem, text, len(text) - len(rest))
    for name, count in Counter(name for factors in dims for name in factors).items():
        if count > 1:
            raise SpecSyntaxError(f"the factor {name!r} is named twice", text, text.rindex(name))
    return tuple(dims)


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """Compute an expression of whole numbers and named sizes; it may use +, -, * and //.

    >>> evaluate("2 * q + 1", {"q": 3})
    7
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)) if number <= MAX_SIZE:
                return number
            case ast.Constant(value=int()):
                raise SpecSyntaxError("a number above 2^63 - 1", text, node.col_offset)
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.Name(id=name):
                raise SpecSyntaxError(
                    f"the size {name!r} is not known; give it in the sizes", text, node.col_offset
                )
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                a, b = value(left), value(right)
                if not b and isinstance(op, ast.FloorDiv):
                    raise SpecSyntaxError(
                        f"the expression divides by {ast.unparse(right)}, which is 0", text, 0
                    )
                result = _OPERATORS[type(op)](a, b)
                if abs(result) > MAX_SIZE:
                    raise SpecSyntaxError("a size above 2^63 - 1", text, 0)
                return result
        raise SpecSyntaxError("only names, numbers, +, -, * and // are allowed", text, 0)

    stripped = text.strip()
    if len(stripped) > 200:
        raise SpecSyntaxError("an index of at most 200 characters is expected", stripped[:40], 0)
    try:
        tree = ast.parse(stripped, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpecSyntaxError("a whole number or a named size is expected", stripped, 0) from None
    return value(tree.body)


def factors_of(
    texts: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Dims, dict[str, Factor]]:
    """Parse a view and slices of its factors; one unknown size per dim follows from the shape.

    Factors have no axes yet, so `axis` is -1.

    >>> factors_of(["(g q) c", "q[1:]"], (6, 5), {"g": 2})[1]["q"]
    Factor(axis=-1, size=3, start=1, length=2)
    """
    text, *slices = texts
    dims = parse_view(text)
    if len(dims) != len(shape):
        raise SpecSyntaxError(
            f"the view has {len(dims)} dims, the tensor {tuple(shape)} has {len(shape)}", text, 0
        )
    by_name: dict[str, Factor] = {}
    for factors, size in zip(dims, shape, strict=True):
        unknown = [name for name in factors if name not in sizes]
        product = prod(sizes[name] for name in factors if name in sizes)
        if wrong := [name for name in factors if not 0 <= sizes.get(name, 0) <= MAX_SIZE]:
            problem = f"{wrong[0]!r} is {shown(sizes[wrong[0]])}, which is not the size of a dim"
            raise SpecSyntaxError(problem, text, text.index(wrong[0]))
        if len(unknown) > 1:
            names = " and ".join(map(repr, unknown))
            problem = f"the sizes of {names} are not known; give all but one"
            raise SpecSyntaxError(problem, text, text.index(unknown[1]))
        rest = size // product if unknown and product else 1
        if product * rest != size:
            names = " ".join(factors)
            problem = (
                f"the factors {names} give a multiple of {product}, but the dim has {size} elements"
            )
            raise SpecSyntaxError(problem, text, 0)
        full_sizes = {name: sizes.get(name, rest) for name in factors}
        by_name |= {name: Factor(-1, length, 0, length) for name, length in full_sizes.items()}
    every = {**sizes, **{name: factor.size for name, factor in by_name.items()}}
    for slice_text in slices:
        match = _SLICE.fullmatch(slice_text)
        if match is None:
            raise SpecSyntaxError("a slice like 'r[:q]' or 'r[3]' is expected", slice_text, 0)
        name, first, colon, last = match.groups()
        if name not in every:
            raise SpecSyntaxError(f"the view has no factor {name!r}", slice_text, 0)
        size = every[name]
        start = evaluate(first, every) if first.strip() else 0
        end = start + 1
        if colon:
            end = evaluate(last, every) if last.strip() else size
        if not 0 <= start <= end <= size:
            raise SpecSyntaxError(
                f"{start}:{end} is outside {name!r}, which has size {size}", slice_text, 0
            )
        if name in by_name:
            by_name[name] = Factor(-1, size, start, end - start)
    return dims, by_name


def views_of(
    source: Sequence[str],
    target: Sequence[str],
    source_shape: Sequence[int],
    target_shape: Sequence[int],
    sizes: Mapping[str, int],
) -> View:
    """Return the equation of two views, each a text and perhaps slices: ``["(g r) c", "r[:2]"]``.

    Factors of the same name are equated; the others are equated in order, if they are equally long.
    Factors of size 1 need no counterpart. Raises SpecSyntaxError if a view does not fit its
    tensor, or the two do not fit each other.

    >>> views_of(["(a b)"], ["b a"], (6,), (3, 2), {"a": 2}).shape
    (2, 3)
    """
    source_dims, ours = factors_of(source, source_shape, sizes)
    target_dims, theirs = factors_of(target, target_shape, sizes)
    shared = [name for name in ours if name in theirs]
    unpaired = [name for name in ours if name not in theirs and ours[name].length != 1]
    unpaired_target = [name for name in theirs if name not in ours and theirs[name].length != 1]
    if len(unpaired) != len(unpaired_target):
        problem = (
            f"the source has {unpaired or 'nothing'} that the target {target[0]!r} lacks, which "
            f"has {unpaired_target or 'nothing'} that the source lacks"
        )
        raise SpecSyntaxError(problem, source[0], 0)
    keys = shared + unpaired, shared + unpaired_target
    for a, b in zip(*keys, strict=True):
        if ours[a].length != theirs[b].length:
            problem = (
                f"{a!r} is {ours[a].length} long in the source, {b!r} {theirs[b].length} in the "
                "target"
            )
            raise SpecSyntaxError(problem, source[0], 0)
    shape = [ours[name].length for name in keys[0]]
    sides = []
    for dims, factors, paired in zip((source_dims, target_dims), (ours, theirs), keys, strict=True):
        axes = {name: axis for axis, name in enumerate(paired)}
        for name in factors:
            if name not in axes:  # one long: it has an axis of its own
                axes[name] = len(shape)
                shape.append(1)
        placed = (tuple(factors[n]._replace(axis=axes[n]) for n in names) for names in dims)
        sides.append(TensorView(tuple(placed)))
    return View(tuple(shape), *sides)


def composed(first: View, second: View) -> View | None:
    """Join two equations into one from `first.source` to `second.target`; None if impossible.

    >>> halves = View((2,), TensorView(((Factor(0, 4, 2, 2),),)), identity_view((2,)).target)
    >>> composed(halves, identity_view((2,))) == halves
    True
    """
    pairs = list(chain(*map(_paired, first.target.dims, second.source.dims)))
    before, after = (TensorView(tuple(pair[side] for pair in pairs)) for side in (0, 1))
    for forward, whole, others, axes in (
        (True, before, after, second.shape),
        (False, after, before, first.shape),
    ):
        outer = first.source if forward else second.target
        made = _substituted(outer, whole, others, len(axes)) if _is_whole(whole) else None
        if made is not None:
            extra = max([len(axes), *(f.axis + 1 for dim in made.dims for f in dim)])
            shape = (*axes, *[1] * (extra - len(axes)))
            return View(shape, *((made, second.target) if forward else (first.source, made)))
    return None


def _paired(
    first: tuple[Factor, ...], second: tuple[Factor, ...]
) -> list[tuple[tuple[Factor, ...], tuple[Factor, ...]]]:
    """Return pairs of equal ranges of a dim's factors in two views: single factors, or all."""
    if [factor.size for factor in first] != [factor.size for factor in second]:
        return [(first, second)]
    return [((a,), (b,)) for a, b in zip(first, second, strict=True)]


def _is_whole(side: TensorView) -> bool:
    return all(len(dim) == 1 and dim[0].length == dim[0].size for dim in side.dims)


def _substituted(
    outer: TensorView, between: TensorView, inner: TensorView, axes: int
) -> TensorView | None:
    """Return `outer` with axes (dims of `between`) replaced by factors of `inner`, or None."""
    parts = {dim[0].axis: factors for dim, factors in zip(between.dims, inner.dims, strict=True)}
    dims = []
    for dim in outer.dims:
        factors: list[Factor] = []
        for factor in dim:
            read = parts.get(factor.axis, ())
            if not read:  # a single index, which gets an axis of its own
                factors.append(factor._replace(axis=axes))
                axes += 1
            elif factor.length == factor.size:
                factors += read
            else:
                # A slice of several factors: the major one takes its start.
                first, *minor = read
                width = prod(f.size for f in minor) or 1
                size, start = -(-factor.size // width), factor.start // width + first.start
                if factor.start % width or (factors and factor.size % width):
                    return None
                factors += [Factor(first.axis, size, start, first.length), *minor]
        dims.append(tuple(factors))
    return TensorView(tuple(dims))


def parts_of_view(
    side: TensorView, box: Box, steps: Sequence[int]
) -> Iterator[tuple[Box, tuple[int, ...], int]]:
    """Yield the boxes of a tensor that together are a box of its view, with steps and offset.

    `steps` are those along the axes of the view; the yielded ones are along the dims. Offsets count
    from the first element of the box of the view.
    """
    for runs in product(*(_runs(factors, box, steps) for factors in side.dims)):
        part = tuple((lo, lo + length) for lo, length, _, _ in runs)
        yield part, tuple(step for _, _, step, _ in runs), sum(before for *_, before in runs)


def _runs(
    factors: Sequence[Factor], box: Box, steps: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Return (first index, length, step, bytes before) of a dim's intervals that `box` covers."""
    runs, weight = [(0, 1, 0, 0)], 1
    for factor in reversed(factors):
        (lo, hi), step = box[factor.axis], steps[factor.axis]
        start, length, by, _ = runs[0]
        # Minor factors are one interval as long as each is whole, at even steps.
        if length == weight and (length == 1 or hi - lo == 1 or step == by * length):
            by = step if length == 1 < hi - lo else by
            runs = [(start + (factor.start + lo) * weight, length * (hi - lo), by, 0)]
        else:
            bounded(len(runs) * (hi - lo))
            runs = [
                (start + (factor.start + index) * weight, length, by, before + (index - lo) * step)
                for index in range(lo, hi)
                for start, length, by, before in runs
            ]
        weight *= factor.size
    return runs


def bounded(count: int) -> None:
    """Raise LayoutError for more than 2^20 pieces of one tensor."""
    if count > MOST_PIECES:
        raise LayoutError(
            f"the map splits a tensor into more than {MOST_PIECES:,} pieces; permute fewer factors "
            "in one map"
        )
