"""Selects tensors and other entries of a checkpoint, and their new names."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import TypeAlias, TypedDict

from shardspec.checkpoint.catalog import Catalog, OpaqueValue, is_plain_entry, opaque_parts
from shardspec.checkpoint.state.state_dict import fitting_paths
from shardspec.checkpoint.targets import Carried, OutputTensor
from shardspec.dtypes import dtype_name, is_cast, is_floating, keeps_dtype, packed
from shardspec.errors import CheckpointError, DTypeError, LayoutError
from shardspec.text import Argument, counted, shown

Patterns: TypeAlias = str | Sequence[str]
"""One pattern of names, or several."""
Renames: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
"""Regular expressions, each with what its first match in a name is replaced with."""


class Selection(TypedDict, total=False):
    """Arguments by which callers choose and rename tensors; see `merge`."""

    include: Patterns | None
    exclude: Patterns
    rename: Renames
    drop: Patterns


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which tensors are wanted of a checkpoint, and how; see `merge`."""

    include: Patterns | None = None
    exclude: Patterns = ()
    rename: Renames = ()
    drop: Patterns = ()
    dtype: str | None = None

    @property
    def is_all(self) -> bool:
        """Whether every tensor is wanted, as it is."""
        return not any((self.include, self.exclude, self.rename, self.drop, self.dtype))

    def wants(self, name: str) -> bool:
        """Return whether something of a name is wanted."""
        included = self.include is None or _matches(name, self.include)
        return included and not (_matches(name, self.exclude) or _matches(name, self.drop))

    def after_map(self) -> "Choice":
        """Return what remains to be done after a map was applied to what is wanted."""
        return Choice(rename=self.rename, dtype=self.dtype)


def _patterns(patterns: Patterns) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _matches(name: str, patterns: Patterns) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _patterns(patterns))


def wanted_names(source: Catalog, choice: Choice) -> list[str]:
    """Return the names of the tensors that patterns choose.

    Raises CheckpointError if a pattern matches nothing, or nothing is left.
    """
    if choice.include is not None and not choice.include:
        raise CheckpointError("include is empty; leave it out to include everything")
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
            f"no tensor of {source.directory} is left of {len(source.names)}; include more, or "
            "exclude less"
        )
    return names


def check_drop(choice: Choice) -> None:
    """Raise LayoutError if tensors are dropped where there is no map."""
    if choice.drop:
        raise LayoutError(
            f"{shown(choice.drop)} is to be dropped (",
            Argument("drop"),
            "), which is for maps; exclude it",
        )


def first_names(names: Sequence[str]) -> str:
    """Return the first of some names, as text."""
    return ", ".join(map(repr, names[:3])) or "nothing: there is no tensor"


# --- under which names


def select(source: Catalog, choice: Choice) -> list[OutputTensor]:
    """Return the tensors that are wanted of a checkpoint, sorted by their new names.

    A pattern or an expression that matches nothing is a `CheckpointError`, as are two tensors of
    one name and a choice of none.
    """
    target = None if choice.dtype is None else _float_dtype(choice.dtype)
    names = wanted_names(source, choice)
    renamed, idle = renamed_names(names, choice.rename)
    for pattern in idle:
        if not any(re.search(pattern, name) for name in source.extras):
            raise CheckpointError(
                f"the expression {pattern!r} matches no name that is to be renamed in "
                f"{source.directory}; the names start with {first_names(names)}"
            )
    wanted = []
    for name in names:
        tensor = source.outline(name)
        stays = keeps_dtype(name) or name in source.facts.keeps_dtype
        casts = target is not None and is_cast(tensor.dtype, target) and not stays
        dtype = target if target and casts else tensor.dtype
        wanted.append(OutputTensor(renamed[name], name, tensor.shape, dtype))
    return sorted(wanted, key=lambda tensor: tensor.name)


def _float_dtype(dtype: str) -> str:
    name = dtype_name(dtype)
    scales = name == "float8_e8m0fnu"  # neither signs nor 0
    if scales or not is_floating(name) or name.startswith("complex") or packed(name) > 1:
        raise DTypeError(
            f"cannot cast to {name}: only floating point tensors are cast, to another dtype of "
            "floating point numbers such as bf16 or float8_e4m3fn"
        )
    return name


def renamed_names(names: Sequence[str], renames: Renames) -> tuple[dict[str, str], list[str]]:
    """Return the new name of each, and the expressions that match none."""
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
                f"tensors {old[new]!r} and {name!r} would both be named {new!r}; rename them apart"
            )
        if name and not new:
            raise CheckpointError(f"tensor {name!r} would have no name left; rename it otherwise")
    return renamed, [pattern for pattern, _ in pairs if names and pattern not in matched]


def carried_values(
    source: Catalog, choice: Choice, wanted: Sequence[OutputTensor], *, objects: bool
) -> Carried:
    """Return what an output with `wanted` tensors takes along of the other entries.

    With `objects`, those that only torch could unpickle are copied as they are stored. Raises
    CheckpointError if two entries would have one name.
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
    old = {tensor.name: tensor.source for tensor in wanted}
    for name, new in names.items():
        if new in old:
            raise CheckpointError(
                f"tensor {old[new]!r} and value {name!r} would both be named {new!r}; rename them "
                "apart"
            )
    old |= {new: name for name, new in names.items()}
    unchanged = {name for name, source_name in old.items() if name == source_name}
    paths = fitting_paths(source.facts.paths, unchanged, old)
    return Carried(frozenset(names), values, paths)


def check_dropped(
    source: Catalog, choice: Choice, carried: Collection[str], drop: bool | None
) -> None:
    """Refuse to lose entries that are not tensors, if they are wanted and not `carried`.

    With `drop` they may be lost; None allows to lose those without tensors in them.
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
            f"{source.directory}: {name!r}{more} may be, or have in it, tensors that cannot be "
            f"written: {_text_of(lost[name])}; leave it out with ",
            Argument("exclude"),
        )
    raise CheckpointError(
        f"{source.directory}: {name!r}{more} would be lost, since the output has no place for it: "
        f"{_text_of(lost[name])}; leave out what is lost with ",
        Argument("drop_values", value=True),
        ", or name it in ",
        Argument("exclude"),
    )


def _text_of(parts: Sequence[OpaqueValue]) -> str:
    return shown(parts[0].text, 200) if parts else "a plain value"


def plain_names(others: Mapping[str, object], choice: Choice) -> dict[str, str]:
    """Return name to new name of the wanted values that are plain: numbers, text, lists of such."""
    wanted = [
        name for name, value in others.items() if is_plain_entry(value) and choice.wants(name)
    ]
    return renamed_names(wanted, choice.rename)[0]
