"""Name maps: which tensors of one model are which of another, as equations between views.

A map is read from TOML. Names may have placeholders for numbers, views are those of
`shardspec.resharding.views`::

    [sizes]                     # numbers, or sums and products of sizes and of a model's config
    g = "num_key_value_heads"
    q = "num_attention_heads // num_key_value_heads"
    d = "hidden_size // num_attention_heads"
    r = "q + 2"

    [[map]]
    source = "model.norm.weight"
    target = "decoder.final_layernorm.weight"

    [[map]]
    source = ["model.layers.{i}.self_attn.q_proj.weight", "(g q d) c"]
    target = ["decoder.layers.{i}.self_attention.linear_qkv.weight", "(g r d) c", "r[:q]"]

    [[zeros]]                   # what of a target no source fills: padding
    target = ["output.weight", "v c", "v[vocab_size:]"]
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from shardspec.errors import InputFileError, LayoutError, SpecSyntaxError
from shardspec.input_files import read_input_file
from shardspec.resharding.views import (
    Cover,
    TensorView,
    View,
    evaluate,
    first_hole,
    identity_view,
    parse_view,
    side_lengths,
    views_of,
)
from shardspec.text import shown

_MOST_BYTES: Final = 4 << 20
"""Of a file of a map."""

Shape: TypeAlias = tuple[int, ...]
Side: TypeAlias = tuple[str, ...]
"""A name, then perhaps a view, then perhaps slices of it."""


class Equation(NamedTuple):
    """Elements of a source tensor that are those of a target tensor."""

    source: str
    """Name in the source."""
    target: str
    """Name in the target."""
    view: View
    """Which elements."""


@dataclass(frozen=True, slots=True)
class NameMap:
    r"""Equations between views of tensors whose names match patterns.

    Examples
    --------
    >>> text = '[[map]]\nsource = "a.{i}.w"\ntarget = ["b.w", "l x", "l[{i}]"]'
    >>> map_ = NameMap.parse(text)
    >>> found = map_.equations({"a.0.w": (3,), "a.1.w": (3,)}, {"b.w": (2, 3)})
    >>> [(e.source, e.target, e.view.shape) for e in found]
    [('a.0.w', 'b.w', (3, 1)), ('a.1.w', 'b.w', (3, 1))]
    """

    rules: tuple[tuple[Side, Side], ...]
    """Per equation both sides."""
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    """Named sizes: numbers, or expressions in other sizes."""
    zeros: tuple[Side, ...] = ()
    """Sides of the target that are padding."""
    unused: tuple[Side, ...] = ()
    """Sides of the source that go nowhere, on purpose."""

    @classmethod
    def load(cls, path: Path | str) -> "NameMap":
        """Read a map from a TOML file.

        Raises
        ------
        LayoutError
            If the file cannot be read, or is not a map.
        """
        try:
            return cls.parse(read_input_file(Path(path), _MOST_BYTES).decode())
        except InputFileError as error:
            raise LayoutError(str(error)) from None
        except (UnicodeDecodeError, LayoutError) as error:
            raise LayoutError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> "NameMap":
        """Read a map from TOML.

        Raises
        ------
        LayoutError
            If the text is not a map.
        """
        try:
            found = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            # Besides its own error: numbers of thousands of digits, and what nests too deep.
            raise LayoutError(f"this is not TOML: {error}") from None
        if unknown := sorted(set(found) - {"map", "sizes", "zeros", "unused"}):
            raise LayoutError(
                f"a map has [sizes], [[map]], [[zeros]] and [[unused]], not {shown(unknown[0])}"
            )
        sizes = found.get("sizes", {})
        if not isinstance(sizes, dict) or not all(
            isinstance(size, int | str) and not isinstance(size, bool) for size in sizes.values()
        ):
            raise LayoutError("[sizes] holds numbers, or expressions as text")
        sources, targets = _sides(found, "map", "source"), _sides(found, "map", "target")
        rules = tuple(zip(sources, targets, strict=True))
        zeros, unused = _sides(found, "zeros", "target"), _sides(found, "unused", "source")
        return cls(rules, dict(sizes), zeros, unused)

    def reversed(self) -> "NameMap":
        """Return the map from target to source; padding is what then goes nowhere."""
        rules = tuple((target, source) for source, target in self.rules)
        return NameMap(rules, self.sizes, self.unused, self.zeros)

    def with_sizes(self, sizes: Mapping[str, int]) -> "NameMap":
        """Return the map with more sizes known, such as those of a model's config."""
        return replace(self, sizes={**self.sizes, **sizes})

    def known_sizes(self) -> dict[str, int]:
        """Return all sizes that can be worked out.

        Examples
        --------
        >>> NameMap((), {"r": "q + 2", "q": 4, "x": "y"}).known_sizes()
        {'q': 4, 'r': 6}
        """
        known = {name: size for name, size in self.sizes.items() if isinstance(size, int)}
        texts = {name: size for name, size in self.sizes.items() if isinstance(size, str)}
        for _ in range(len(texts)):  # each may need the one behind it
            for name, text in texts.items():
                try:
                    known[name] = evaluate(text, known)
                except SpecSyntaxError as error:
                    if "is not known" not in error.problem:
                        raise LayoutError(f"the size {name!r}: {error}") from None
        return known

    def equations(self, source: Mapping[str, Shape], target: Mapping[str, Shape]) -> list[Equation]:
        """Return the equations between the tensors that there are.

        Parameters
        ----------
        source, target
            Name to global shape.

        Raises
        ------
        LayoutError
            If a view does not fit a tensor.
        """
        known = self.known_sizes()
        found = []
        for left, right in self.rules:
            for bound in _bindings(left[0], right[0], source, target):
                one, other = _filled(left, bound), _filled(right, bound)
                if one[0] in source and other[0] in target:
                    view = _view(one, other, source, target, known)
                    found.append(Equation(one[0], other[0], view))
        return found

    def target_shapes(self, source: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the names and shapes of the target that the views and sizes imply.

        Raises
        ------
        LayoutError
            If sizes are not known, or equations of one tensor imply several shapes.

        Examples
        --------
        >>> map_ = NameMap((((("a"), "x y"), ("b", "y (x z)")),), {"z": 1})
        >>> map_.target_shapes({"a": (2, 3)})
        {'b': (3, 2)}
        """
        known = self.known_sizes()
        found: dict[str, Shape] = {}
        for left, right in self.rules:
            bindings = _bindings(left[0], left[0], source, source)
            for bound in (
                b for one in bindings for b in _stacked(left, right[0], one, source, known)
            ):
                one, other = _filled(left, bound), _filled(right, bound)
                try:
                    shape = _implied(one, other, source[one[0]], known)
                except SpecSyntaxError as error:
                    problem = str(error).splitlines()[0]  # without its picture
                    raise LayoutError(
                        f"the shape of {other[0]!r} by {' and '.join(map(repr, other[1:]))}: "
                        f"{problem}, as --sizes config.json does (with_sizes)"
                    ) from None
                if found.setdefault(other[0], shape) != shape:
                    raise LayoutError(
                        f"{other[0]!r} is {found[other[0]]} by one equation and {shape} by another"
                    )
        return found

    def padding(self, target: Mapping[str, Shape]) -> list[tuple[str, TensorView]]:
        """Return which parts of the target are zero."""
        return self._sides(self.zeros, target)

    def dropped(self, source: Mapping[str, Shape]) -> list[tuple[str, TensorView]]:
        """Return which parts of the source go nowhere, on purpose."""
        return self._sides(self.unused, source)

    def _sides(
        self, rules: Sequence[Side], shapes: Mapping[str, Shape]
    ) -> list[tuple[str, TensorView]]:
        known = self.known_sizes()
        found = []
        for rule in rules:
            for bound in _bindings(rule[0], rule[0], shapes, shapes):
                side = _filled(rule, bound)
                found.append((side[0], _view(side, side, shapes, shapes, known).source))
        return found


_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_]\w*)\}")


def _sides(found: Mapping[str, object], key: str, end: str) -> tuple[Side, ...]:
    """Return one end of every table of a list of tables."""
    tables = found.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise LayoutError(f"{key} is a list of tables, as in [[{key}]]")
    sides = []
    for table in tables:
        value = table.get(end)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise LayoutError(
                f"{end} is a name, or a list of a name, a view and slices of it; not {shown(value)}"
            )
        sides.append(tuple(texts))
    return tuple(sides)


def _pattern(name: str) -> re.Pattern[str]:
    text, seen = "", set[str]()
    for number, part in enumerate(_PLACEHOLDER.split(name)):
        if number % 2 == 0:
            text += re.escape(part)
        else:
            text += f"(?P={part})" if part in seen else f"(?P<{part}>0|[1-9][0-9]{{0,8}})"
            seen.add(part)
    return re.compile(text)


def _bindings(
    left: str, right: str, source: Mapping[str, Shape], target: Mapping[str, Shape]
) -> list[dict[str, int]]:
    """Return the numbers that placeholders stand for: those for which both names exist."""
    sides = []
    for pattern, names in ((_pattern(left), source), (_pattern(right), target)):
        matches = (pattern.fullmatch(name) for name in names)
        sides.append([{k: int(v) for k, v in m.groupdict().items()} for m in matches if m])
    if not (sides[0] and sides[1]):
        return []
    shared = sorted(set(sides[0][0]) & set(sides[1][0]))
    others: dict[tuple[int, ...], list[dict[str, int]]] = {}
    for bound in sides[1]:
        others.setdefault(tuple(bound[key] for key in shared), []).append(bound)
    return [
        {**one, **other}
        for one in sides[0]
        for other in others.get(tuple(one[key] for key in shared), [])
    ]


def _stacked(
    left: Sequence[str],
    right: str,
    bound: Mapping[str, int],
    source: Mapping[str, Shape],
    sizes: Mapping[str, int],
) -> list[dict[str, int]]:
    """Return the numbers of the targets that are stacked in one source, such as experts.

    A placeholder of the target's name that the source's lacks, but a slice of its view has as in
    ``e[{e}]``, stands for each index of that factor.
    """
    name = _PLACEHOLDER.sub(lambda found: str(bound.get(found[1], found[0])), left[0])
    found = [dict(bound)]
    for missing in sorted(set(_PLACEHOLDER.findall(right)) - set(bound)):
        for text in left[2:]:
            factor, _, index = text.replace(" ", "").partition("[")
            if index == f"{{{missing}}}]":
                size = side_lengths(left[1:2], source[name], sizes).get(factor, 0)
                found = [{**one, missing: n} for one in found for n in range(size)]
                break
    return found


def _filled(side: Side, bound: Mapping[str, int]) -> Side:
    def number(match: re.Match[str]) -> str:
        if match[1] not in bound:
            raise LayoutError(f"{shown(side[0])}: neither name has the placeholder {match[0]}")
        return str(bound[match[1]])

    return tuple(_PLACEHOLDER.sub(number, text) for text in side)


def _view_or_plain(side: Side, shape: Shape) -> Sequence[str]:
    return side[1:] or [" ".join(f"dim{dim}" for dim in range(len(shape)))]


def _view(
    left: Side,
    right: Side,
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    sizes: Mapping[str, int],
) -> View:
    source, target = sources[left[0]], targets[right[0]]
    try:
        if left[1:] or right[1:]:
            views = _view_or_plain(left, source), _view_or_plain(right, target)
            return views_of(*views, source, target, sizes)
    except SpecSyntaxError as error:
        problem = str(error)
    else:
        if source == target:
            return identity_view(source)
        problem = f"shapes differ, {source} and {target}, and no view says how"
    both = "" if left == right else f" to {right[0]!r} {target}"
    raise LayoutError(f"{left[0]!r} {source}{both}: {problem}")


def _implied(left: Side, right: Side, source: Shape, sizes: Mapping[str, int]) -> Shape:
    """Return the shape of a target whose view names factors of the source or known sizes."""
    if not left[1:] and not right[1:]:
        return source
    lengths = side_lengths(_view_or_plain(left, source), source, sizes)
    if not right[1:]:
        return tuple(lengths.values())
    dims = parse_view(right[1])
    names = [name for factors in dims for name in factors]
    cut = {text.split("[")[0].strip() for text in right[2:]}
    free = iter([n for name, n in lengths.items() if name not in names])
    found: dict[str, int] = {}
    for name in names:
        if name in cut and name not in sizes:
            raise SpecSyntaxError(
                f"the size {name!r} is not known; give it in the sizes",
                right[1],
                right[1].index(name),
            )
        length = lengths.get(name, 0)
        if name not in lengths and name not in cut:
            length = next(free, 0)
        found[name] = sizes.get(name, length)
    return tuple(prod(found[name] for name in factors) for factors in dims)


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
    written: dict[str, list[tuple[str, Cover]]] = {name: [] for name in target}
    read: dict[str, list[Cover]] = {name: [] for name in source}
    for equation in equations:
        written[equation.target].append((equation.source, equation.view.target.covered()))
        read[equation.source].append(equation.view.source.covered())
    for name, side in map_.padding(target):
        written[name].append(("padding", side.covered()))
    for name, side in map_.dropped(source):
        read[name].append(side.covered())
    problems = [p for name in target for p in _not_once(name, target[name], written[name])]
    unused = (name for name in source if first_hole(source[name], read[name]) is not None)
    return MapReport(tuple(equations), tuple(problems), tuple(unused))


def _not_once(name: str, shape: Shape, covers: Sequence[tuple[str, Cover]]) -> Iterator[str]:
    for (one, a), (other, b) in combinations(covers, 2):
        both = [x & y for x, y in zip(a, b, strict=True)]
        if all(both) and 0 not in shape:
            index = tuple((bits & -bits).bit_length() - 1 for bits in both)
            yield f"{name!r}: both {one!r} and {other!r} are written at index {index}"
            return
    hole = first_hole(shape, [cover for _, cover in covers])
    if hole is not None:
        yield f"{name!r}: nothing is written at index {hole}"
