"""Defines name maps: equations between tensors of two models, as q, k, v equal parts of ``qkv``.

A map is read from TOML. Names may have placeholders for numbers. A view such as "(g q d) c" names
the factors of each dim (`shardspec.resharding.views`)::

    model_types = ["llama"]     # accepted model types; without this line, all

    [sizes]                     # numbers, or expressions in other sizes and keys of a config
    "{i}" = "num_hidden_layers" # a placeholder counts from 0 up to this size
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

    [[zeros]]                   # elements of the target that are padding
    target = ["output.weight", "v c", "v[vocab_size:]"]

    [[unused]]                  # elements of the source that are dropped
    source = "lm_head.weight"

The source must have every tensor that a map names.
"""

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from shardspec.errors import InputFileError, LayoutError, SpecSyntaxError
from shardspec.input_files import MAX_TOML_BYTES, read_input_file
from shardspec.resharding.map_file import (
    Binding,
    NamesByForm,
    Side,
    bindings,
    check_model_type,
    check_pattern,
    config_sizes,
    filled,
    in_words_of_config,
    known_sizes,
    names_by_form,
    placeholders,
    read_map,
    unknown_root,
)
from shardspec.resharding.views import (
    MAX_SIZE,
    TensorView,
    View,
    factors_of,
    identity_view,
    parse_view,
    views_of,
)
from shardspec.text import shown

_MOST_EQUATIONS: Final = 1 << 20
_WORD: Final = re.compile(r"[A-Za-z_]\w*")

Shape: TypeAlias = tuple[int, ...]


class Equation(NamedTuple):
    """States that elements of a source tensor equal elements of a target tensor."""

    source: str
    """Name in the source."""
    target: str
    """Name in the target."""
    view: View
    """Indices of the elements in both tensors."""


@dataclass(frozen=True, slots=True)
class NameMap:
    r"""Equations between views of tensors whose names match patterns.

    Examples
    --------
    >>> text = '[[map]]\nsource = "a.{i}.w"\ntarget = ["b.w", "l x", "l[{i}]"]'
    >>> map_ = NameMap.parse(text)
    >>> equations = equations_of(map_, {"a.0.w": (3,), "a.1.w": (3,)}, {"b.w": (2, 3)})
    >>> [(e.source, e.target, e.view.shape) for e in equations]
    [('a.0.w', 'b.w', (3, 1)), ('a.1.w', 'b.w', (3, 1))]
    """

    rules: tuple[tuple[Side, Side], ...]
    """(source side, target side) of each equation."""
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    """Named sizes: numbers, or expressions in other sizes; ``{i}`` is the count of numbers."""
    zeros: tuple[Side, ...] = ()
    """Sides of the target that are padding."""
    unused: tuple[Side, ...] = ()
    """Sides of the source that are dropped on purpose."""
    optional: Collection[int] = frozenset()
    """Indices of rules whose tensors the source may lack."""
    model_types: tuple[str, ...] = ()
    """Accepted values of `model_type`; empty accepts all."""
    numbers: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Placeholder -> its numbers, if these are not 0, 1, 2, …"""

    @classmethod
    def load(cls, path: Path | str) -> "NameMap":
        """Read a map from a TOML file.

        Raises
        ------
        LayoutError
            If the file cannot be read, or is not a map.
        """
        try:
            return cls.parse(read_input_file(Path(path), MAX_TOML_BYTES).decode())
        except InputFileError as error:
            raise LayoutError(str(error)) from None
        except (UnicodeDecodeError, LayoutError) as error:
            raise LayoutError(f"{path}: is not a name map: {error}") from None

    @classmethod
    def parse(cls, text: str) -> "NameMap":
        """Read a map from TOML.

        Raises
        ------
        LayoutError
            If the text is not a map.
        """
        return cls(**read_map(text))

    def reversed(self) -> "NameMap":
        """Return the map in the other direction, from target to source; padding is dropped."""
        rules = tuple((target, source) for source, target in self.rules)
        return replace(self, rules=rules, zeros=(), unused=self.zeros)

    def with_sizes(self, sizes: Mapping[str, object]) -> "NameMap":
        """Return the map with more sizes: numbers by name, or a model's whole config.

        Raises
        ------
        LayoutError
            If the config is of a model that the map is not for.
        """
        check_model_type(sizes, self.model_types)
        return replace(self, sizes={**self.sizes, **config_sizes(sizes)})


class Naming(ABC):
    """Picks the name maps for a source by its tensors' names and shapes; see `model_names`."""

    __slots__ = ()

    @abstractmethod
    def maps(
        self,
        source: Mapping[str, Shape],
        where: object = "the state dict",
        behind: Collection[str] = (),
    ) -> tuple[NameMap, ...]:
        """Return the maps to apply one after the other.

        Parameters
        ----------
        source
            Name to global shape of the tensors to map.
        where
            The source, for errors.
        behind
            Names of further tensors of the source, which are dropped.

        Raises
        ------
        CheckpointError
            If the tensors are not those that the maps are for.
        """


Names: TypeAlias = NameMap | Mapping[str, str] | Naming
"""A name map, new names by old ones, or `model_names`; other names are kept."""


def equations_of(
    map_: NameMap, source: Mapping[str, Shape], target: Mapping[str, Shape]
) -> list[Equation]:
    """Return the equations that a map makes for tensors of these names and shapes.

    Parameters
    ----------
    source, target
        Name to global shape.

    Raises
    ------
    LayoutError
        If a view does not fit a tensor.
    """
    sizes = known_sizes(map_.sizes)
    source_names, target_names = names_by_form(source), names_by_form(target)
    equations: list[Equation] = []
    for source_side, target_side in map_.rules:
        shared = sorted(placeholders(source_side[0]) & placeholders(target_side[0]))
        in_views = placeholders(" ".join((*source_side[1:], *target_side[1:])))
        views: dict[object, View] = {}  # layers are alike
        others = defaultdict(list)
        for name, bound in _bindings(map_, target_side[0], target, target_names).items():
            others[tuple([bound[key] for key in shared])].append((name, bound))
        for name, bound in _bindings(map_, source_side[0], source, source_names).items():
            for other, numbers in others[tuple([bound[key] for key in shared])]:
                both = bound | numbers
                key = source[name], target[other], *[both.get(number) for number in in_views]
                if key not in views:
                    sides = filled(source_side, both), filled(target_side, both)
                    views[key] = _view(map_, *sides, source, target, sizes)
                equations.append(Equation(name, other, views[key]))
                _bounded(len(equations))
    return equations


def bindings_of(map_: NameMap, source: Mapping[str, Shape]) -> list[list[Binding]]:
    """Return for each rule the numbers of its placeholders: {"i": 0}, {"i": 1}, ... for layers.

    Raises
    ------
    LayoutError
        If a view does not fit a tensor.
    """
    sizes, names = known_sizes(map_.sizes), names_by_form(source)
    bindings_of_rules, count = [], 0
    for source_side, target_side in map_.rules:
        bound: list[Binding] = []
        stacked = lru_cache(1024)(partial(_stacked, source_side, target_side[0], sizes=sizes))
        for tensor, binding in _bindings(map_, source_side[0], source, names).items():
            try:
                rows = stacked(source[tensor])
            except SpecSyntaxError as error:
                raise LayoutError(
                    f"cannot map {source_side[0]!r} {source[tensor]}: "
                    f"{_problem(map_, error, source_side)}"
                ) from None
            _bounded(count + prod(map(len, rows.values())))
            every = [binding]
            for name, numbers in rows.items():
                every = [{**before, name: number} for before in every for number in numbers]
            bound += every
            count += len(every)
        bindings_of_rules.append(bound)
    return bindings_of_rules


def target_shapes(
    map_: NameMap, source: Mapping[str, Shape], *, without: Collection[str] = ()
) -> dict[str, Shape]:
    """Return the names and shapes that a map gives to the tensors of a source.

    Parameters
    ----------
    source
        Name to global shape.
    without
        Names of source tensors to ignore.

    Raises
    ------
    LayoutError
        If sizes are not known, or equations of one tensor imply several shapes.

    Examples
    --------
    >>> map_ = NameMap((((("a"), "x y"), ("b", "y (x z)")),), {"z": 1})
    >>> target_shapes(map_, {"a": (2, 3)})
    {'b': (3, 2)}
    """
    sizes = known_sizes(map_.sizes)
    implied: dict[str, Shape] = {}
    for (source_side, target_side), bound in zip(
        map_.rules, bindings_of(map_, source), strict=True
    ):
        shapes: dict[object, Shape] = {}
        for binding in bound:
            ours, theirs = filled(source_side, binding), filled(target_side, binding)
            if ours[0] in without:
                continue
            shape = source[ours[0]]
            key = ours[1:], theirs[1:], shape
            try:
                if key not in shapes:
                    shapes[key] = _implied(ours, theirs, shape, sizes)
            except SpecSyntaxError as error:
                raise LayoutError(
                    f"the shape of {theirs[0]!r}, made of {ours[0]!r} {shape}: "
                    f"{_problem(map_, error, ours, theirs)}"
                ) from None
            if implied.setdefault(theirs[0], shapes[key]) != shapes[key]:
                raise LayoutError(
                    f"{theirs[0]!r} is {implied[theirs[0]]} by one equation and "
                    f"{shapes[key]} by another"
                )
    return implied


def padding(map_: NameMap, target: Mapping[str, Shape]) -> list[tuple[str, TensorView]]:
    """Return (name, view) of each part of the target that the map fills with zeros."""
    return _sides(map_, map_.zeros, target)


def unused_parts(map_: NameMap, source: Mapping[str, Shape]) -> list[tuple[str, TensorView]]:
    """Return (name, view) of each part of the source that the map drops on purpose."""
    return _sides(map_, map_.unused, source)


def _sides(
    map_: NameMap, rules: Sequence[Side], shapes: Mapping[str, Shape]
) -> list[tuple[str, TensorView]]:
    sizes, names = known_sizes(map_.sizes), names_by_form(shapes if rules else ())
    sides = (
        filled(rule, bound)
        for rule in rules
        for bound in _bindings(map_, rule[0], shapes, names).values()
    )
    return [(side[0], _view(map_, side, side, shapes, shapes, sizes).source) for side in sides]


def _bindings(
    map_: NameMap, pattern: str, names: Mapping[str, Shape], by_form: NamesByForm
) -> dict[str, Binding]:
    """Return each name that matches `pattern` -> the numbers of its placeholders."""
    if "{" not in pattern:
        return {pattern: {}} if pattern in names else {}
    check_pattern(pattern)
    some = map_.numbers.keys() & placeholders(pattern)
    return {
        name: bound
        for name, bound in bindings(pattern, by_form).items()
        if all(bound[placeholder] in map_.numbers[placeholder] for placeholder in some)
    }


def _view(
    map_: NameMap,
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
        problem = _problem(map_, error, left, right)
    both = "" if left == right else f" to {right[0]!r} {target}"
    raise LayoutError(f"cannot map {left[0]!r} {source}{both}: {problem}")


def _problem(map_: NameMap, error: SpecSyntaxError, *sides: Side) -> str:
    """Return the text of an error in a view, with sizes called by their keys in the config."""
    sizes = known_sizes(map_.sizes)
    words = {word for side in sides for text in side[1:] for word in _WORD.findall(text)}
    unknown = sorted(word for word in words & map_.sizes.keys() if word not in sizes)
    if unknown:
        root = unknown_root(unknown[0], map_.sizes)
        return (
            f"the size {root!r} is not known; give the model's sizes, as its config.json has them"
        )
    return in_words_of_config(error.problem, map_.sizes)


def _bounded(count: int) -> None:
    if count > _MOST_EQUATIONS:
        raise LayoutError(
            f"the map has more than {_MOST_EQUATIONS:,} equations; write one view of a stacked "
            "tensor instead of one per row"
        )


def _stacked(ours: Side, theirs: str, source: Shape, sizes: Mapping[str, int]) -> dict[str, range]:
    """Return placeholder -> its numbers, where one source stacks the targets, such as experts.

    In ``source = ["experts", "e h c", "e[{e}]"]`` and ``target = "expert.{e}"``, the placeholder
    stands for each index of the factor `e`.
    """
    rows = {}
    for missing in sorted(placeholders(theirs) - placeholders(ours[0])):
        slices = (text.replace(" ", "").partition("[") for text in ours[2:])
        stack = next((factor for factor, _, index in slices if index == f"{{{missing}}}]"), None)
        if stack is not None:
            lengths = factors_of(ours[1:2], source, sizes)[1]
            rows[missing] = range(lengths[stack].size if stack in lengths else 0)
    return rows


def _view_or_plain(side: Side, shape: Shape) -> Sequence[str]:
    return side[1:] or [" ".join(f"dim{dim}" for dim in range(len(shape)))]


def _implied(ours: Side, theirs: Side, source: Shape, sizes: Mapping[str, int]) -> Shape:
    """Return the shape of target `theirs`, from factors that its view shares with source `ours`."""
    if not ours[1:] and not theirs[1:]:
        return source
    factors = factors_of(_view_or_plain(ours, source), source, sizes)[1]
    lengths = {name: factor.length for name, factor in factors.items()}
    if not theirs[1:]:
        return tuple(lengths.values())
    dims = parse_view(theirs[1])
    names = [name for factors in dims for name in factors]
    cut = {text.split("[")[0].strip() for text in theirs[2:]}
    for name in names:
        if name in cut and name not in sizes:
            problem = f"the size {name!r} is not known; give it in the sizes"
            raise SpecSyntaxError(problem, theirs[1], theirs[1].index(name))
    named = {name: sizes[name] for name in names if name in sizes}
    view = [" ".join(named), *theirs[2:]]
    covered = factors_of(view, list(named.values()), {**lengths, **sizes})[1] if named else {}
    # Factors without a partner of the same name are equated in order, as `views_of` does.
    free = [length for name, length in lengths.items() if name not in names]
    unpaired = [
        n for n in names if n not in lengths and (n not in covered or covered[n].length != 1)
    ]
    if len(free) > len(unpaired):
        free = [length for length in free if length != 1]
    known = {
        **dict.fromkeys(names, 0),
        **lengths,
        **dict(zip(unpaired, free, strict=False)),
        **sizes,
    }
    shape = tuple(prod(known[name] for name in factors) for factors in dims)
    if min(shape, default=0) < 0 or prod(size for size in shape if size) > MAX_SIZE:
        raise SpecSyntaxError(f"no tensor is {shown(shape)}", theirs[1], 0)
    return shape
