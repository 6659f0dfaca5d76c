"""Views as text: factors of dims in einops' words, slices of them, and sizes by name."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from shardspec.errors import SpecSyntaxError
from shardspec.resharding.views import Factor, TensorView, View

__all__ = ["evaluate", "parse_view", "side_lengths", "views_of"]

_TOKEN: Final = re.compile(r"\s*(?:([A-Za-z_]\w*)|(\()|(\)))")
_SLICE: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*\[([^\]:]*)(?:(:)([^\]:]*))?\]\s*")


def parse_view(text: str) -> tuple[tuple[str, ...], ...]:
    """Return per dim the names of its factors.

    Raises
    ------
    SpecSyntaxError
        If the text is no view; shows where.

    Examples
    --------
    >>> parse_view("(g q d) c")
    (('g', 'q', 'd'), ('c',))
    """
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise SpecSyntaxError(
                "names of factors and pairs of parentheses are expected", text, at
            )
        name, opens, closes = match.groups()
        if name and group is None:
            dims.append((name,))
        elif name and group is not None:
            group.append(name)
        elif opens and group is None:
            group = []
        elif closes and group is not None:
            dims.append(tuple(group))
            group = None
        else:
            raise SpecSyntaxError("this parenthesis has no partner", text, match.end() - 1)
        at = match.end()
    if group is not None:
        raise SpecSyntaxError("a parenthesis is not closed", text, end)
    names = [name for factors in dims for name in factors]
    for name in names:
        if names.count(name) > 1:
            raise SpecSyntaxError(f"the factor {name!r} is named twice", text, text.rindex(name))
    return tuple(dims)


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum, difference or product of whole numbers and named sizes.

    Examples
    --------
    >>> evaluate("q + 2*kv", {"q": 4, "kv": 1})
    6
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.Name(id=name):
                raise SpecSyntaxError(
                    f"the size {name!r} is not known; give it in the sizes", text, node.col_offset
                )
            case ast.BinOp(left=left, op=op, right=right):
                a, b = value(left), value(right)
                match op:
                    case ast.Add():
                        return a + b
                    case ast.Sub():
                        return a - b
                    case ast.Mult():
                        return a * b
                    case ast.FloorDiv() if b:
                        return a // b
        raise SpecSyntaxError("only names, numbers, +, -, * and // are allowed", text, 0)

    stripped = text.strip()
    if len(stripped) > 200:
        raise SpecSyntaxError("an index of at most 200 characters is expected", stripped[:40], 0)
    try:
        tree = ast.parse(stripped, mode="eval")
    except (SyntaxError, ValueError):
        raise SpecSyntaxError("a whole number or a named size is expected", stripped, 0) from None
    return value(tree.body)


def _sizes(
    dims: Sequence[Sequence[str]], shape: Sequence[int], sizes: Mapping[str, int], text: str
) -> dict[str, int]:
    """Return the size of every factor of a view: those given, and one more per dim.

    Examples
    --------
    >>> _sizes((("g", "d"), ("c",)), (12, 5), {"d": 4}, "(g d) c")
    {'g': 3, 'd': 4, 'c': 5}
    """
    if len(dims) != len(shape):
        raise SpecSyntaxError(
            f"the view has {len(dims)} dims, the tensor {tuple(shape)} has {len(shape)}", text, 0
        )
    found: dict[str, int] = {}
    for factors, size in zip(dims, shape, strict=True):
        unknown = [name for name in factors if name not in sizes]
        known = prod(sizes[name] for name in factors if name in sizes)
        if len(unknown) > 1:
            raise SpecSyntaxError(
                f"the sizes of {' and '.join(map(repr, unknown))} are not known; give all but one",
                text,
                text.index(unknown[1]),
            )
        if known * (1 if not unknown else (size // known if known else 0)) != size:
            raise SpecSyntaxError(
                f"the factors {' '.join(factors)} come to a multiple of {known}, but the dim is "
                f"{size} long",
                text,
                0,
            )
        for name in factors:
            found[name] = sizes[name] if name in sizes else size // known
    return found


def _slices(texts: Sequence[str], sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the bounds of the factors that are cut."""
    found = {}
    for text in texts:
        match = _SLICE.fullmatch(text)
        if match is None:
            raise SpecSyntaxError("a slice like 'r[:q]' or 'r[3]' is expected", text, 0)
        name, first, colon, last = match.groups()
        if name not in sizes:
            raise SpecSyntaxError(f"the view has no factor {name!r}", text, 0)
        start = evaluate(first, sizes) if first.strip() else 0
        end = start + 1
        if colon:
            end = evaluate(last, sizes) if last.strip() else sizes[name]
        if not 0 <= start <= end <= sizes[name]:
            raise SpecSyntaxError(
                f"{start}:{end} is not within the {sizes[name]} of {name!r}", text, 0
            )
        found[name] = (start, end)
    return found


def views_of(
    source: Sequence[str],
    target: Sequence[str],
    source_shape: Sequence[int],
    target_shape: Sequence[int],
    sizes: Mapping[str, int],
) -> View:
    """Return the equation between two views.

    Parameters
    ----------
    source, target
        The view of each side, then slices of its factors: ``["(g r d) c", "r[:q]"]``. Factors of
        the same name are equated; what is left is equated in order, if it is equally long. A
        factor that is cut to one index needs no partner.
    source_shape, target_shape
        Of the tensors.
    sizes
        Sizes that are known by name.

    Raises
    ------
    SpecSyntaxError
        If a view does not fit its tensor, or the two do not fit each other.

    Examples
    --------
    >>> view = views_of(["(g q d)"], ["(g r d)", "r[:q]"], (8,), (12,), {"g": 2, "q": 2, "r": 3})
    >>> view.shape
    (2, 2, 2)
    """
    sides = [
        _Side.parsed(source, source_shape, sizes),
        _Side.parsed(target, target_shape, sizes),
    ]
    lengths = [side.lengths for side in sides]
    shared = [name for name in lengths[0] if name in lengths[1]]
    left = [
        [n for n in mine if n not in other and not (mine[n] == 1 and n in side.cuts)]
        for mine, other, side in zip(lengths, reversed(lengths), sides, strict=True)
    ]
    if len(left[0]) != len(left[1]):
        raise SpecSyntaxError(
            f"the source has {left[0] or 'nothing'} that the target {sides[1].text!r} lacks, which "
            f"has {left[1] or 'nothing'} that the source lacks",
            sides[0].text,
            0,
        )
    pairs = [(name, name) for name in shared] + list(zip(*left, strict=True))
    axes: list[dict[str, int]] = [{}, {}]
    for axis, (one, other) in enumerate(pairs):
        if lengths[0][one] != lengths[1][other]:
            raise SpecSyntaxError(
                f"{one!r} is {lengths[0][one]} long in the source, {other!r} "
                f"{lengths[1][other]} in the target",
                sides[0].text,
                0,
            )
        axes[0][one] = axes[1][other] = axis
    shape = [lengths[0][one] for one, _ in pairs]
    for side, own in zip(sides, axes, strict=True):
        for name in side.sizes:
            if name not in own:  # cut to one index: a dim of the view that has no partner
                own[name] = len(shape)
                shape.append(1)
    return View(tuple(shape), sides[0].as_view(axes[0]), sides[1].as_view(axes[1]))


def side_lengths(
    texts: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return how far a view reaches in each of its factors.

    Examples
    --------
    >>> side_lengths(["(g r)", "r[1:]"], (6,), {"r": 3})
    {'g': 2, 'r': 2}
    """
    return _Side.parsed(texts, shape, sizes).lengths


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of an equation as text, and the sizes of its factors."""

    text: str
    dims: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]
    cuts: Mapping[str, tuple[int, int]]

    @classmethod
    def parsed(
        cls, texts: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]
    ) -> "_Side":
        text, *cuts = texts
        dims = parse_view(text)
        own = _sizes(dims, shape, sizes, text)
        return cls(text, dims, own, _slices(cuts, {**sizes, **own}))

    @property
    def lengths(self) -> dict[str, int]:
        """How far the view reaches in every factor."""
        return {
            name: self.cuts[name][1] - self.cuts[name][0] if name in self.cuts else size
            for name, size in self.sizes.items()
        }

    def as_view(self, axes: Mapping[str, int]) -> TensorView:
        lengths = self.lengths
        return TensorView(
            tuple(
                tuple(
                    Factor(
                        axes[name], self.sizes[name], self.cuts.get(name, (0, 0))[0], lengths[name]
                    )
                    for name in factors
                )
                for factors in self.dims
            )
        )
