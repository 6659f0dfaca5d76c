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

import operator
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    factors_of,
    first_index,
    identity_view,
    parse_view,
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
            shared = sorted(_placeholders(left[0]) & _placeholders(right[0]))
            others = defaultdict(list)
            for bound in _bindings(right[0], target):
                others[tuple(bound[key] for key in shared)].append(bound)
            for bound in _bindings(left[0], source):
                for other in others[tuple(bound[key] for key in shared)]:
                    ends = _filled(left, bound | other), _filled(right, bound | other)
                    view = _view(*ends, source, target, known)
                    found.append(Equation(ends[0][0], ends[1][0], view))
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
            for bound in _bindings(left[0], source):
                shape = source[_filled(left[:1], bound)[0]]
                for every in _stacked(left, right[0], bound, shape, known):
                    one, other = _filled(left, every), _filled(right, every)
                    try:
                        implied = _implied(one, other, shape, known)
                    except SpecSyntaxError as error:
                        problem = str(error).splitlines()[0]  # without its picture
                        raise LayoutError(
                            f"the shape of {other[0]!r} by {' and '.join(map(repr, other[1:]))}: "
                            f"{problem}, as --sizes config.json does (with_sizes)"
                        ) from None
                    if found.setdefault(other[0], implied) != implied:
                        raise LayoutError(
                            f"{other[0]!r} is {found[other[0]]} by one equation and {implied} by "
                            "another"
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
        sides = (_filled(rule, bound) for rule in rules for bound in _bindings(rule[0], shapes))
        return [(one[0], _view(one, one, shapes, shapes, known).source) for one in sides]


_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_]\w*)\}")


def _placeholders(name: str) -> set[str]:
    return set(_PLACEHOLDER.findall(name))


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


def _bindings(pattern: str, names: Mapping[str, Shape]) -> list[dict[str, int]]:
    """Return, per name that a pattern matches, the numbers that its placeholders stand for."""
    if "{" not in pattern:
        return [{}] if pattern in names else []
    text, seen = "", set[str]()
    for number, part in enumerate(_PLACEHOLDER.split(pattern)):
        if number % 2 == 0:
            text += re.escape(part)
        else:
            text += f"(?P={part})" if part in seen else f"(?P<{part}>0|[1-9][0-9]{{0,8}})"
            seen.add(part)
    matches = map(re.compile(text).fullmatch, names)
    return [{key: int(n) for key, n in found.groupdict().items()} for found in matches if found]


def _stacked(
    left: Side, right: str, bound: dict[str, int], source: Shape, sizes: Mapping[str, int]
) -> list[dict[str, int]]:
    """Return the numbers of the targets that are stacked in one source, such as experts.

    A placeholder of the target's name that the source's lacks, but a slice of its view has as in
    ``e[{e}]``, stands for each index of that factor.
    """
    found = [bound]
    for missing in sorted(_placeholders(right) - bound.keys()):
        slices = (text.replace(" ", "").partition("[") for text in left[2:])
        stack = next((factor for factor, _, index in slices if index == f"{{{missing}}}]"), None)
        if stack is not None:
            lengths = factors_of(left[1:2], source, sizes)[1]
            size = lengths[stack].size if stack in lengths else 0
            found = [{**one, missing: n} for one in found for n in range(size)]
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
        if source == target:
            return identity_view(source)
        problem = f"shapes differ, {source} and {target}, and no view says how"
    except SpecSyntaxError as error:
        problem = str(error)
    both = "" if left == right else f" to {right[0]!r} {target}"
    raise LayoutError(f"{left[0]!r} {source}{both}: {problem}")


def _implied(left: Side, right: Side, source: Shape, sizes: Mapping[str, int]) -> Shape:
    """Return the shape of a target whose view names factors of the source or known sizes."""
    if not left[1:] and not right[1:]:
        return source
    factors = factors_of(_view_or_plain(left, source), source, sizes)[1]
    lengths = {name: factor.length for name, factor in factors.items()}
    if not right[1:]:
        return tuple(lengths.values())
    dims = parse_view(right[1])
    names = [name for factors in dims for name in factors]
    cut = {text.split("[")[0].strip() for text in right[2:]}
    # Factors without a partner of the same name are equated in order.
    free = iter([length for name, length in lengths.items() if name not in names])
    for name in names:
        if name in cut and name not in sizes:
            problem = f"the size {name!r} is not known; give it in the sizes"
            raise SpecSyntaxError(problem, right[1], right[1].index(name))
        if name not in lengths and name not in cut:
            lengths[name] = next(free, 0)
    whole = {**lengths, **sizes}
    return tuple(prod(whole[name] for name in factors) for factors in dims)


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
    problems = (_problem(name, target[name], written[name]) for name in target)
    unused = (
        name for name in source if first_index(source[name], read[name], operator.not_) is not None
    )
    return MapReport(tuple(equations), tuple(filter(None, problems)), tuple(unused))


def _problem(name: str, shape: Shape, covers: Sequence[tuple[str, Cover]]) -> str | None:
    """Return where a tensor is written twice, else where it is not."""
    sets = [cover for _, cover in covers]
    twice = first_index(shape, sets, lambda number: number > 1)
    if twice is not None:
        one, other, *_ = (
            writer
            for writer, cover in covers
            if all(bits >> at & 1 for bits, at in zip(cover, twice, strict=True))
        )
        return f"{name!r}: both {one!r} and {other!r} are written at index {twice}"
    hole = first_index(shape, sets, operator.not_)
    return None if hole is None else f"{name!r}: nothing is written at index {hole}"
