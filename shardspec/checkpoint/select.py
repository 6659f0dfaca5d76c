"""What is wanted of a checkpoint: which tensors, under which names, in which dtype, and how cut."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.targets import OutputTensor
from shardspec.dtypes import dtype_name, is_cast, is_floating, packed
from shardspec.errors import CheckpointError, DTypeError, LayoutError, ShardSpecError
from shardspec.layout.layout import Layout, SpecLike, match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

Patterns: TypeAlias = str | Sequence[str]
"""One pattern of names, or several."""
Renames: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
"""Regular expressions, each with what its first match in a name is replaced with."""


class Choice(NamedTuple):
    """What is wanted of a checkpoint."""

    include: Patterns | None = None
    """Name patterns as in a shell (``*``, ``?``, ``[abc]``): what matches any of them, all if it
    is None,"""
    exclude: Patterns = ()
    """and none of these, is wanted."""
    rename: Renames = ()
    """Regular expressions and their replacements, one after the other; see `re.sub`."""
    dtype: str | None = None
    """What floating point tensors are cast to; others, and complex ones, stay as they are."""

    def wants(self, name: str) -> bool:
        """Return whether something of a name is wanted."""
        included = self.include is None or _matches(name, self.include)
        return included and not _matches(name, self.exclude)


def select(source: Catalog, choice: Choice) -> list[OutputTensor]:
    """Return the tensors that are wanted of a checkpoint, sorted by their new names.

    A pattern or an expression that matches nothing is a `CheckpointError`, as are two tensors of
    one name and a choice of none.
    """
    target = None if choice.dtype is None else _float_dtype(choice.dtype)
    if choice.include is not None and not choice.include:
        raise CheckpointError("include has no pattern; leave it out where all is wanted")
    for pattern in (*_several(choice.include or ()), *_several(choice.exclude)):
        if not any(fnmatchcase(name, pattern) for name in (*source.names, *source.extras)):
            first = _first(source.names) or "(there are none)"
            raise CheckpointError(
                f"pattern {pattern!r} matches nothing of {source.directory}; the names start "
                f"with {first}"
            )
    names = [name for name in source.names if choice.wants(name)]
    if not names and source.names:
        raise CheckpointError(
            f"no tensor of {source.directory} is left of {len(source.names)}; include more, or "
            "exclude less"
        )
    renamed, idle = _renamed(names, choice.rename)
    for pattern in idle:
        if not any(re.search(pattern, name) for name in source.extras):
            raise CheckpointError(
                f"the expression {pattern!r} matches no name that is to be renamed in "
                f"{source.directory}; the names start with {_first(names)}"
            )
    wanted = []
    for name in names:
        tensor = source.outline(name)
        cast = target is not None and is_cast(tensor.dtype, target)
        dtype = target if cast and target else tensor.dtype
        wanted.append(OutputTensor(renamed[name], name, tensor.shape, dtype))
    return sorted(wanted, key=lambda tensor: tensor.name)


def _several(patterns: Patterns) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _matches(name: str, patterns: Patterns) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _several(patterns))


def _first(names: Iterable[str]) -> str:
    return ", ".join(map(repr, list(names)[:3]))


def _float_dtype(dtype: str) -> str:
    name = dtype_name(dtype)
    if name == "float8_e8m0fnu":
        raise DTypeError(
            f"cannot cast to {name}: it holds scales, and has neither signs nor 0; choose "
            "float8_e4m3fn or another dtype of numbers"
        )
    if not is_floating(name) or name.startswith("complex") or packed(name) > 1:
        raise DTypeError(
            f"cannot cast to {name}: only floating point tensors are cast, to another floating "
            "point dtype such as bf16"
        )
    return name


def _renamed(names: Sequence[str], renames: Renames) -> tuple[Mapping[str, str], list[str]]:
    """Return the new name of every tensor, and the expressions that match none."""
    pairs = list(renames.items()) if isinstance(renames, Mapping) else renames
    expressions = []
    for pattern, replacement in pairs:
        try:
            expressions.append((re.compile(pattern), replacement))
        except re.error as error:
            raise CheckpointError(
                f"{pattern!r} is no regular expression: {error}; escape what should stand for "
                "itself with a backslash"
            ) from None
    matched: set[str] = set()
    old: dict[str, str] = {}
    for name in names:
        new = name
        for expression, replacement in expressions:
            try:
                new, count = expression.subn(replacement, new, count=1)
            except (re.error, IndexError) as error:
                raise CheckpointError(f"cannot replace by {replacement!r}: {error}") from None
            if count:
                matched.add(expression.pattern)
        if new in old:
            raise CheckpointError(
                f"tensors {old[new]!r} and {name!r} would both be named {new!r}; rename them apart"
            )
        if name and not new:
            raise CheckpointError(f"tensor {name!r} would have no name left; rename it otherwise")
        old[new] = name
    idle = [pattern for pattern, _ in pairs if names and pattern not in matched]
    return {name: new for new, name in old.items()}, idle


def carried_values(
    source: Catalog, choice: Choice, *, objects: bool
) -> tuple[frozenset[str], dict[str, object]]:
    """Return what is no tensor and goes along into formats of torch: old names, and new to value.

    Objects that only torch could make again go along as they are stored, if the format has room.
    """
    known = source.objects if objects else {}
    names = plain({**source.extras, **dict.fromkeys(known)}, choice)
    values = {new: known.get(name, source.extras[name]) for name, new in names.items()}
    return frozenset(names), values


def plain(others: Mapping[str, object], choice: Choice) -> dict[str, str]:
    """Return name to new name of the wanted values that are plain: numbers, text, lists of such."""
    wanted = [name for name, value in others.items() if _is_plain(value) and choice.wants(name)]
    return dict(_renamed(wanted, choice.rename)[0])


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def tied(source: Catalog, wanted: Sequence[OutputTensor]) -> dict[str, str]:
    """Return the tensors that are stored as another one: name to the first name of the same bytes.

    Only what lies at the same places of the same files counts, never what has equal values.
    """
    by_place: dict[object, list[OutputTensor]] = {}
    for tensor in wanted:
        outline = source.outline(tensor.source)
        if outline.boxes:
            origin = source.origin(tensor.source)
            key = (outline.shape, outline.dtype, tensor.dtype, origin)
            by_place.setdefault(key, []).append(tensor)
    same = {}
    for alike in by_place.values():
        if len(alike) > 1:
            # From one place on they may go along their dims differently.
            first: dict[object, str] = {}
            for tensor in alike:
                boxes = source.tensor(tensor.source).boxes
                places = frozenset((box.path, box.offset, box.box, box.strides) for box in boxes)
                name = first.setdefault(places, tensor.name)
                if name != tensor.name:
                    same[tensor.name] = name
    return same


def layouts_by_rules(
    mesh: DeviceMesh,
    rules: Mapping[str, SpecLike],
    wanted: Sequence[OutputTensor],
    otherwise: Callable[[OutputTensor], ShardingSpec] | None = None,
) -> dict[str, Layout]:
    """Return how each tensor is cut: by the rule for it, `otherwise`, or not at all."""
    specs = match_rules(rules, {tensor.name: len(tensor.shape) for tensor in wanted})
    layouts = {}
    # One for all tensors that are alike.
    layout = lru_cache(None)(partial(Layout, mesh))
    for tensor in wanted:
        spec = specs.get(tensor.name)
        if spec is None:
            spec = ShardingSpec(len(tensor.shape)) if otherwise is None else otherwise(tensor)
        if spec.partials:
            raise LayoutError(
                f"tensor {tensor.name!r}: spec {spec} has pending reductions, but what is written "
                "or loaded has none; leave them out"
            )
        try:
            layouts[tensor.name] = layout(spec, tensor.shape, tensor.dtype)
        except ShardSpecError as error:
            raise LayoutError(f"tensor {tensor.name!r}: {error}") from None
    return layouts


def layouts_like(
    other: Catalog, wanted: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of another checkpoint, and each tensor cut as there."""
    if other.mesh is None:
        raise CheckpointError(
            f"{other.directory}: a checkpoint in the format of {other.format} does not say its "
            "mesh and specs; give --mesh and --rules"
        )
    known = set(other.names)
    layouts = {}
    for tensor in wanted:
        if tensor.name not in known:
            raise CheckpointError(
                f"{other.directory}: has no tensor {tensor.name!r} that says how to cut it; "
                "--rename it, --exclude it, or give --mesh and --rules"
            )
        spec = other.outline(tensor.name).spec
        if spec is None or spec.dims != len(tensor.shape):
            said = "does not say how it is cut" if spec is None else f"cuts it by {spec}"
            raise CheckpointError(
                f"{other.directory}: {said}, but tensor {tensor.name!r} has {len(tensor.shape)} "
                "dims; give --mesh and --rules"
            )
        layouts[tensor.name] = Layout(
            other.mesh, spec.without_partial(), tensor.shape, tensor.dtype
        )
    return other.mesh, layouts
