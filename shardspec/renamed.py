"""Arguments and modules with a new name: the former one works for one release, with a warning."""

import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from shardspec.errors import ShardSpecError

_P = ParamSpec("_P")
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


def renamed_module(former: str, new: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module whose names have moved to another one."""

    def attribute(name: str) -> Any:  # noqa: ANN401  # of any type
        found = vars(import_module(new))
        if name.startswith("__") or name not in found:
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        warnings.warn(
            f"{former} is {new} now; the former name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return found[name]

    return attribute


def renamed(**names: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a function take keyword arguments by former names too, each with its present name."""

    def decorated(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for old, new in names.items():
                if (former := kwargs.pop(old, None)) is not None:
                    value = kwargs.get(new)
                    kwargs[new] = renamed_argument(function.__name__, new, value, old, former)
            return function(*args, **kwargs)

        return call

    return decorated
