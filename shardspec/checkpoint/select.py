"""Which tensors of a checkpoint are wanted, under which names and in which dtype."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.targets import OutputTensor
from shardspec.dtypes import dtype_name, is_cast, is_floating, packed
from shardspec.errors import CheckpointError, DTypeError

__all__ = ["Choice", "Patterns", "Renames", "plain", "select", "tied"]

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
        """Return whether something of a name is wanted.

        Examples
        --------
        >>> Choice(include=("model.*",), exclude=("*.bias",)).wants("model.up.bias")
        False
        """
        wanted = self.include is None or _any(name, _several(self.include))
        return wanted and not _any(name, _several(self.exclude))


def select(source: Catalog, choice: Choice) -> list[OutputTensor]:
    """Return the tensors that are wanted of a checkpoint, sorted by their new names.

    Raises
    ------
    CheckpointError
        If a pattern or an expression matches nothing, an expression is none, two tensors get the
        same name, or nothing is left.
    DTypeError
        If the dtype is unknown or not of floating point numbers.
    """
    target = None if choice.dtype is None else _float_dtype(choice.dtype)
    if choice.include is not None and not choice.include:
        raise CheckpointError("include has no pattern; leave it out where all is wanted")
    for pattern in (*_several(choice.include or ()), *_several(choice.exclude)):
        matched = _any_of(source.names, pattern) or _any_of(source.extras, pattern)
        if not matched:
            shown = ", ".join(map(repr, source.names[:3])) or "(there are none)"
            raise CheckpointError(
                f"pattern {pattern!r} matches nothing of {source.directory}; the names start "
                f"with {shown}"
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
                f"{source.directory}; the names start with {', '.join(map(repr, names[:3]))}"
            )
    wanted = []
    for name in names:
        tensor = source.outline(name)
        cast = target is not None and is_cast(tensor.dtype, target)
        wanted.append(
            OutputTensor(
                renamed[name], name, tensor.shape, target if cast and target else tensor.dtype
            )
        )
    return sorted(wanted, key=lambda tensor: tensor.name)


def _several(patterns: Patterns) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _any_of(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


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
    rename = list(renames.items()) if isinstance(renames, Mapping) else renames
    found = dict.fromkeys(names, "")
    matched: set[str] = set()
    expressions = []
    for pattern, replacement in rename:
        try:
            expressions.append((re.compile(pattern), replacement))
        except re.error as error:
            raise CheckpointError(
                f"{pattern!r} is no regular expression: {error}; escape what should stand for "
                "itself with a backslash"
            ) from None
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
        found[name] = new
    return found, [pattern for pattern, _ in rename if names and pattern not in matched]


def carried_by_dcp(source: Catalog, choice: Choice) -> tuple[frozenset[str], dict[str, object]]:
    """Return what is no tensor and goes into torch's DCP: old names, and values by new names."""
    names = plain({**source.extras, **dict.fromkeys(source.objects)}, choice)
    values = {new: source.objects.get(name, source.extras[name]) for name, new in names.items()}
    return frozenset(names), values


def plain(others: Mapping[str, object], choice: Choice) -> dict[str, str]:
    """Return the values that torch can be given along with tensors: plain ones that are wanted.

    Returns
    -------
    dict
        Name to new name.

    Examples
    --------
    >>> others = {"step": 7, "x.betas": (0.9, 0.95), "args": object()}
    >>> plain(others, Choice(exclude=("s*",), rename=[("^x[.]", "")]))
    {'x.betas': 'betas'}
    """
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
