"""Selects, renames and reshapes the tensors of a checkpoint without copying data.

A stored box of a source tensor becomes a few boxes of a target tensor: the same bytes of the same
file, with other strides. `shardspec.resharding.views` explains the equations that say which element
of the source is which element of the target.
"""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import Final, TypeAlias, TypedDict

from shardspec.boxes import box_shape, box_size
from shardspec.checkpoint.catalog import (
    ZEROS,
    Carried,
    Catalog,
    DerivedCatalog,
    FileBox,
    OpaqueValue,
    Outline,
    OutputTensor,
    StoredBox,
    StoredTensor,
    is_plain_entry,
    opaque_parts,
    row_major_strides,
)
from shardspec.checkpoint.state.state_dict import fitting_paths
from shardspec.checkpoint.storage.strict_json import json_beside
from shardspec.dtypes import dtype_name, is_cast, is_floating, item_bytes, keeps_dtype, packed
from shardspec.errors import CheckpointError, DTypeError, LayoutError
from shardspec.resharding.name_map import Equation, NameMap, Names, Naming, Shape, padding
from shardspec.resharding.total import apply_map
from shardspec.resharding.views import MOST_PIECES, TensorView, View, bounded, parts_of_view
from shardspec.text import Argument, counted, shown

Patterns: TypeAlias = str | Sequence[str]
"""One pattern of names, or several."""
Renames: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
"""Regular expressions, each with the replacement of its first match in a name."""


_OPTIMIZER: Final = re.compile(r"(\w+\.)?optim(izer)?(_\w+|s|izers)?\..*", re.DOTALL)
"""Names of optimizer state: of Megatron-core, of FSDP2, and any under ``optimizer``."""


class Selection(TypedDict, total=False):
    """Keyword arguments of `merge` and others that select and rename tensors."""

    include: Patterns | None
    exclude: Patterns
    rename: Renames
    drop: Patterns


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Selection of tensors, their new names and dtype; see `merge`."""

    include: Patterns | None = None
    exclude: Patterns = ()
    rename: Renames = ()
    drop: Patterns = ()
    dtype: str | None = None

    @property
    def is_all(self) -> bool:
        """True if every tensor is selected without changes."""
        return not any((self.include, self.exclude, self.rename, self.drop, self.dtype))

    def wants(self, name: str) -> bool:
        """Return True if a name matches `include`, and not `exclude`."""
        included = self.include is None or matches(name, self.include)
        return included and not (matches(name, self.exclude) or matches(name, self.drop))

    def after_map(self) -> "Choice":
        """Return the options that apply after a name map: `rename` and `dtype`."""
        return Choice(rename=self.rename, dtype=self.dtype)


def _patterns(patterns: Patterns) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else patterns


def matches(name: str, patterns: Patterns) -> bool:
    """Return True if any pattern matches a name.

    >>> matches("model.up.weight", "*.weight"), matches("model.up.bias", ["*.weight", "head.*"])
    (True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in _patterns(patterns))


def wanted_names(source: Catalog, choice: Choice) -> list[str]:
    """Return the names of the tensors that `include` and `exclude` select.

    Raises CheckpointError if a pattern matches nothing, or no tensor is selected.
    """
    if choice.include is not None and not choice.include:
        raise CheckpointError("include is empty; omit it to include everything")
    everything = (*source.names, *source.extras)
    patterns = (choice.include or (), choice.exclude, choice.drop)
    for pattern in chain.from_iterable(map(_patterns, patterns)):
        if not any(fnmatchcase(name, pattern) for name in everything):
            raise CheckpointError(
                f"pattern {pattern!r} matches nothing of {source.directory}; the names start "
                f"with {first_names(source.names)}"
            )
    names = [name for name in source.names if choice.wants(name)]
    if not names and source.names:
        raise CheckpointError(
            f"none of the {len(source.names)} tensors of {source.directory} is selected; include "
            "more, or exclude less"
        )
    return names


def without_optimizer(names: Iterable[str]) -> list[str]:
    """Return the names without those of optimizer state.

    >>> without_optimizer(["up.weight", "optimizer.state.exp_avg.up.weight"])
    ['up.weight']
    """
    return [name for name in names if not _OPTIMIZER.fullmatch(name)]


def check_drop(choice: Choice) -> None:
    """Raise LayoutError if `drop` is used without a name map."""
    if choice.drop:
        raise LayoutError(
            Argument("drop"),
            f" is only for maps of names; exclude {shown(choice.drop)} instead",
        )


def first_names(names: Sequence[str]) -> str:
    """Return the first three names in quotes, for errors.

    >>> first_names(["a", "b", "c", "d"]), first_names([])
    ("'a', 'b', 'c'", 'nothing: there is no tensor')
    """
    return ", ".join(map(repr, names[:3])) or "nothing: there is no tensor"


# --- new names


def select(source: Catalog, choice: Choice) -> list[OutputTensor]:
    """Return the selected tensors of a checkpoint, sorted by their new names.

    Raises a `CheckpointError` if a pattern or expression matches nothing, if two tensors get the
    same name, or if no tensor is selected.
    """
    target = None if choice.dtype is None else _float_dtype(choice.dtype)
    names = wanted_names(source, choice)
    renamed, idle = renamed_names(names, choice.rename)
    for pattern in idle:
        if not any(re.search(pattern, name) for name in source.extras):
            raise CheckpointError(
                f"the expression {pattern!r} matches no name selected in {source.directory}; "
                f"the names start with {first_names(names)}"
            )
    selected = []
    for name in names:
        tensor = source.outline(name)
        stays = keeps_dtype(name) or name in source.facts.keeps_dtype
        casts = target is not None and is_cast(tensor.dtype, target) and not stays
        dtype = target if target and casts else tensor.dtype
        selected.append(OutputTensor(renamed[name], name, tensor.shape, dtype))
    return sorted(selected, key=lambda tensor: tensor.name)


def _float_dtype(dtype: str) -> str:
    name = dtype_name(dtype)
    scales = name == "float8_e8m0fnu"  # neither signs nor 0
    if scales or not is_floating(name) or name.startswith("complex") or packed(name) > 1:
        raise DTypeError(
            f"cannot cast to {name}: only floating point tensors are cast, to another dtype of "
            "floating point numbers such as bf16"
        )
    return name


def renamed_names(names: Sequence[str], renames: Renames) -> tuple[dict[str, str], list[str]]:
    """Return old to new name, and the regular expressions that match no name.

    >>> renamed_names(["model.up", "head"], {"^model[.]": "", "^x": "y"})
    ({'model.up': 'up', 'head': 'head'}, ['^x'])
    """
    pairs = list(renames.items()) if isinstance(renames, Mapping) else renames
    matched: set[str] = set()
    renamed: dict[str, str] = {}
    try:
        expressions = [(re.compile(pattern), replacement) for pattern, replacement in pairs]
        for name in names:
            new = name
            for expression, replacement in expressions:
                new, count = expression.subn(replacement, new, count=1)
                if count:
                    matched.add(expression.pattern)
            renamed[name] = new
    except (re.error, IndexError) as error:
        raise CheckpointError(
            f"cannot rename by the regular expressions {pairs!r}: {error}; escape what should "
            "stand for itself with a backslash"
        ) from None
    old: dict[str, str] = {}
    for name, new in renamed.items():
        if old.setdefault(new, name) != name:
            raise CheckpointError(
                f"tensors {old[new]!r} and {name!r} would both be named {new!r}; give them "
                "different names"
            )
        if name and not new:
            raise CheckpointError(f"tensor {name!r} would get an empty name; choose another name")
    return renamed, [pattern for pattern, _ in pairs if names and pattern not in matched]


def carried_values(
    source: Catalog, choice: Choice, tensors: Sequence[OutputTensor], *, objects: bool
) -> Carried:
    """Return the selected values to copy, such as a step count, besides `tensors`.

    With `objects`, entries that only torch could unpickle are copied unread. Raises
    CheckpointError if two entries would get the same name.
    """
    objects_by_name = source.facts.objects if objects else {}
    names = plain_names({**source.extras, **dict.fromkeys(objects_by_name)}, choice)
    values = {new: objects_by_name.get(name, source.extras[name]) for name, new in names.items()}
    target = None if choice.dtype is None else _float_dtype(choice.dtype)
    for name in names if target else ():
        for tensor in source.facts.pickled.get(name, ()):
            if target and is_cast(tensor.dtype, target):
                raise CheckpointError(
                    f"{source.directory}: entry {name!r} is copied as it is stored, and tensor "
                    f"{tensor.name!r} in its pickle is not cast; exclude the entry, or choose "
                    "another format"
                )
    old = {tensor.name: tensor.source for tensor in tensors}
    for name, new in names.items():
        if new in old:
            raise CheckpointError(
                f"tensor {old[new]!r} and value {name!r} would both be named {new!r}; give them "
                "different names"
            )
    old |= {new: name for name, new in names.items()}
    unchanged = {name for name, source_name in old.items() if name == source_name}
    paths = fitting_paths(source.facts.paths, unchanged, old)
    return Carried(frozenset(names), values, paths)


def check_dropped(
    source: Catalog, choice: Choice, carried: Collection[str], drop: bool | None
) -> None:
    """Raise CheckpointError if a selected value is not in `carried`, the names that are copied.

    With `drop` values may be lost. With None, only those without tensors may be lost.
    """
    lost = {
        name: parts
        for name, value in source.extras.items()
        if name not in carried and choice.wants(name)
        for parts in [list(opaque_parts(value))]
        if all(part.inside for part in parts)
        and (drop is not None or any(part.tensors for part in parts))
    }
    if not lost or drop:
        return
    name = min(lost)
    rest = counted(len(lost) - 1, "other entry", "other entries")
    more = f" (and {rest})" if len(lost) > 1 else ""
    if drop is None:
        raise CheckpointError(
            f"{source.directory}: {name!r}{more} may contain tensors that cannot be written: "
            f"{_text_of(lost[name])}; omit it with ",
            Argument("exclude"),
        )
    raise CheckpointError(
        f"{source.directory}: {name!r}{more} would be lost, since the output format cannot store "
        f"it: {_text_of(lost[name])}; drop all such values with ",
        Argument("drop_values", value=True),
        ", or this one with ",
        Argument("exclude"),
    )


def _text_of(parts: Sequence[OpaqueValue]) -> str:
    return shown(parts[0].text, 200) if parts else "a plain value"


def plain_names(others: Mapping[str, object], choice: Choice) -> dict[str, str]:
    """Return old to new names of the selected plain values, without objects that were not read.

    >>> plain_names({"step": 7, "rng": OpaqueValue("a generator")}, Choice(rename={"^": "x."}))
    {'step': 'x.step'}
    """
    selected = [
        name for name, value in others.items() if is_plain_entry(value) and choice.wants(name)
    ]
    return renamed_names(selected, choice.rename)[0]


# --- names and shapes of a map


class CatalogNaming(Naming):
    """Names for a model's tensors that depend on the checkpoint: its contents choose the maps."""

    __slots__ = ()
    config: Mapping[str, object]
    """The config of the model."""

    @abstractmethod
    def with_dtype(self, dtype: object) -> "CatalogNaming":
        """Return a copy for output in `dtype`: quantized tensors become numbers first."""

    @abstractmethod
    def applied(self, source: Catalog, choice: Choice | None, dropped: Collection[str]) -> Catalog:
        """Return a view of a checkpoint under the new names."""


def mapped(
    source: Catalog,
    names: Names | None,
    choice: Choice | None = None,
    *,
    dropped: Collection[str] = (),
) -> Catalog:
    """Return a view of a checkpoint under the names of a map; without a map, the checkpoint.

    The map need not use tensors that `choice` excludes or that are `dropped`. Raises LayoutError
    if the map names or skips a tensor wrongly, is for another model type, or mixes dtypes, or if a
    tensor has a pending reduction.
    """
    if names is None:
        return source
    if isinstance(names, CatalogNaming):
        return names.applied(source, choice, dropped)
    if not isinstance(names, NameMap | Mapping):
        raise LayoutError(
            f"names= is {shown(names)}; give a NameMap, a dict of new names, or model_names(...)"
        )
    extras = source.extras
    if choice is not None:
        dropped = {*dropped, *source.names} - {*wanted_names(source, choice)}
        extras = {name: value for name, value in extras.items() if choice.wants(name)}
    shapes = {name: source.outline(name).shape for name in sorted(dropped)}
    if isinstance(names, Mapping):
        if unknown := [name for name in names if name not in source.names]:
            raise LayoutError(f"names= maps {shown(unknown[0])}, which {source.directory} lacks")
        rules = (((name,), (names.get(name, name),)) for name in source.names)
        return MappedCatalog(source, NameMap(tuple(rules)), shapes, extras)
    return through(source, [names], shapes, extras)


def mapped_choice(source: Catalog, names: Names | None, choice: Choice) -> tuple[Catalog, Choice]:
    """Return the selected tensors under a map's names, and the options not applied yet.

    Raises LayoutError as `mapped` does, and if `drop` is given without a map.
    """
    if names is None:
        check_drop(choice)
        return source, choice
    return mapped(source, names, choice), choice.after_map()


def through(
    source: Catalog,
    maps: Sequence[NameMap],
    dropped: Mapping[str, Shape],
    extras: Mapping[str, object],
) -> Catalog:
    """Apply name maps one after the other to a checkpoint, without the `dropped` tensors."""
    for name_map in maps:
        source = MappedCatalog(source, configured(source, name_map), dropped, extras)
        dropped = dict(source.facts.dropped)
    return source


def configured(source: Catalog, names: NameMap) -> NameMap:
    """Return a map with its symbols, such as numbers of heads, set by the config.json nearby.

    Raises LayoutError if the map is not for that model type.
    """
    config = config_beside(source)
    if config is None:
        return names
    numbers = {name: size for name, size in names.sizes.items() if isinstance(size, int)}
    return names.with_sizes(config).with_sizes(numbers)


def config_beside(source: Catalog) -> dict[str, object] | None:
    """Return the content of the config.json beside a checkpoint; None if it cannot be read."""
    config = json_beside(source.home, "config.json")
    return config if isinstance(config, dict) else None


def config_of(source: Catalog, names: Names | None) -> Mapping[str, object] | None:
    """Return the config of a model: that of `names`, else the config.json beside the checkpoint."""
    return names.config if isinstance(names, CatalogNaming) else config_beside(source)


def require_finished(tensor: Outline[FileBox]) -> None:
    """Raise LayoutError if a tensor is stored as partial sums, which cannot be mapped."""
    if tensor.pending:
        raise LayoutError(
            f"{tensor.name!r} is stored with a reduction pending; merge or reshard the checkpoint "
            "first, which finishes it"
        )


class MappedCatalog(DerivedCatalog):
    """A view of a checkpoint under a name map; boxes are mapped on demand."""

    def __init__(
        self,
        source: Catalog,
        names: NameMap,
        dropped: Mapping[str, Shape],
        extras: Mapping[str, object],
    ) -> None:
        outlines = {name: source.outline(name) for name in source.names if name not in dropped}
        shapes = {name: outline.shape for name, outline in outlines.items()}
        targets, behind, report = apply_map(names, {**shapes, **dropped}, dropped)
        if not report.equations:
            first = ", ".join(map(shown, source.names[:3]))
            raise LayoutError(
                f"the map names no tensor of {source.directory}, whose names start with {first}"
            )
        report.require_total()
        self._equations: dict[str, list[Equation]] = {}
        self._dtypes: dict[str, str] = {}
        for equation in report.equations:
            outline = outlines[equation.source]
            dtype = self._dtypes.setdefault(equation.target, outline.dtype)
            if dtype != outline.dtype:
                raise LayoutError(
                    f"the map makes {equation.target!r} from tensors of {dtype} and of "
                    f"{outline.dtype} ({equation.source!r}); cast one of them first"
                )
            require_finished(outline)
            self._equations.setdefault(equation.target, []).append(equation)
        self._padding: dict[str, list[TensorView]] = {}
        for target, side in padding(names, targets):
            if target not in self._equations:
                raise LayoutError(f"target {target!r} would be all padding; remove it from the map")
            self._padding.setdefault(target, []).append(side)
        self._shapes = targets
        facts = source.facts
        uncast = (e.target for e in report.equations if e.source in facts.keeps_dtype)
        facts = replace(
            facts,
            keeps_dtype=frozenset(uncast),
            dropped=behind,
            paths=fitting_paths(facts.paths, extras, self._equations),
            objects={name: facts.objects[name] for name in facts.objects if name in extras},
            pickled={name: facts.pickled[name] for name in facts.pickled if name in extras},
        )
        super().__init__(source, self._equations, extras, source.mesh, facts)

    def equations(self, name: str) -> Sequence[Equation]:
        """Return the equations between source and target elements of one target tensor."""
        return self._equations[name]

    def _look_up(self, name: str) -> StoredTensor:
        width = item_bytes(self._dtypes[name])
        parts_of_files = (
            box
            for equation in self._equations[name]
            for stored in self.base.tensor(equation.source).boxes
            for box in target_boxes(equation.view, stored, width)
        )
        boxes = list(islice(parts_of_files, MOST_PIECES + 1))
        bounded(len(boxes))
        for side in self._padding.get(name, ()):
            factors = sorted(factor for dim in side.dims for factor in dim)
            full_box = tuple((0, factor.length) for factor in factors)
            parts = parts_of_view(side, full_box, [0] * len(full_box)) if box_size(full_box) else ()
            boxes += [StoredBox(part, (), 0, ZEROS, 0) for part, _, _ in parts]
        return StoredTensor(name, self._shapes[name], self._dtypes[name], None, (), tuple(boxes))


def target_boxes(view: View, stored: StoredBox, width: int) -> Iterator[StoredBox]:
    """Yield the boxes of a target tensor whose bytes are in one stored box of the source."""
    strides = stored.strides or row_major_strides(box_shape(stored.box), width)
    sides = [[side] for side in stored.box]
    for box in view.source.boxes(stored.box, len(view.shape)):
        steps, at = view.source.in_memory(strides, sides, [lo for lo, _ in box])
        for part, by, before in parts_of_view(view.target, box, steps):
            plain = row_major_strides(box_shape(part), width)
            flat = all(n == 1 or a == b for n, a, b in zip(box_shape(part), by, plain, strict=True))
            yield replace(
                stored, box=part, offset=stored.offset + at + before, strides=None if flat else by
            )
