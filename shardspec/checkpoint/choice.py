"""Which tensors of a checkpoint are wanted, by patterns of their names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import TypeAlias, TypedDict

from shardspec.checkpoint.catalog import Catalog
from shardspec.errors import CheckpointError, LayoutError
from shardspec.text import Argument, shown

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
        """Return what is left to be done where a map has been taken of what is wanted."""
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
    known = (*source.names, *source.extras)
    patterns = (choice.include or (), choice.exclude, choice.drop)
    for pattern in chain.from_iterable(map(_patterns, patterns)):
        if not any(fnmatchcase(name, pattern) for name in known):
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
