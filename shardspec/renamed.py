"""Arguments and modules with a new name: the former one works for one release, with a warning."""

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from shardspec.errors import ShardSpecError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def renamed_module(former: str, new: str) -> ModuleType:
    """Return a module that can be imported by its former name, and has the names of another."""

    def attribute(name: str) -> Any:  # noqa: ANN401  # of any type
        found = vars(import_module(new))
        if name.startswith("__") or name not in found:
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        _warn(f"{former} is {new} now; the former name goes with the next release")
        return found[name]

    module = sys.modules[former] = module_from_spec(ModuleSpec(former, None))
    module.__getattr__ = attribute  # type: ignore[method-assign]  # as a module's own source would
    return module


def renamed(**names: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a function take keyword arguments by former names too, each with its present name."""

    def decorated(function: Callable[_P, _T]) -> Callable[_P, _T]:
        places, called = list(inspect.signature(function).parameters), function.__name__

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for old, new in names.items():
                if (former := kwargs.pop(old, None)) is None:
                    continue
                _warn(f"{called} takes {new}= in place of {old}=, which goes with the next release")
                if dict(zip(places, args, strict=False), **kwargs).get(new):
                    raise ShardSpecError(
                        f"{called} was given both {new}= and {old}=; leave out {old}="
                    )
                kwargs[new] = former
            return function(*args, **kwargs)

        return call

    return decorated


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=3)
