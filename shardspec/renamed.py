"""Arguments that have a new name: the former one is taken for one release, with a warning."""

import warnings
from typing import TypeVar

from shardspec.errors import ShardSpecError

_T = TypeVar("_T")


def renamed_argument(function: str, new: str, value: _T, old: str, former: _T | None) -> _T:
    """Return what was given for an argument, under its name or the former one (None if nothing).

    `function` is who takes it, and calls this directly. Both names at once are refused.
    """
    if former is None:
        return value
    warnings.warn(
        f"{function} takes {new}= in place of {old}=, which goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    if value:
        raise ShardSpecError(f"{function} was given both {new}= and {old}=; leave out {old}=")
    return former
