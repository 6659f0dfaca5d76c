"""Pickles read by Python's own unpickler, with a list of names and inert classes in their place.

A pickle is a program: it names functions and classes, which an unpickler imports and calls. Here
every name is looked up in a list that the format gives. What is not on the list is refused; what is
on it stands for a class of ours, which keeps its arguments or makes a plain value. The instructions
are screened before (`pickle_screen`), for the unpickler believes sizes that it is told.

No instruction can change one of these classes, or what was made of checked arguments: they refuse
a state, and have no attributes that could be set.
"""

import gc
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Never, Self, TypeAlias

from shardspec.checkpoint.torch_files.pickle_screen import RefusedError, screen
from shardspec.errors import CheckpointError

__all__ = [
    "Global",
    "Names",
    "Record",
    "StateDict",
    "UnlistedNameError",
    "made_by",
    "mere_name",
    "record_class",
    "unpickle",
]


class UnlistedNameError(CheckpointError):
    """A pickle is whole, as far as it was read, but names what the list does not have."""


class _UnlistedError(RefusedError):
    pass


class Global(type):
    """What a name in a pickle stands for: a class of ours that runs nothing of the pickle's."""

    name: str
    """How values of it are called."""

    def __new__(  # noqa: D102  # described by its class
        cls, name: str, bases: tuple[type, ...], members: dict[str, object]
    ) -> "Global":
        return super().__new__(cls, name, bases, {"__slots__": (), "name": name, **members})

    def __setattr__(cls, key: str, value: object) -> None:
        raise RefusedError(f"changes {cls.name}; nothing of it was run")

    def __setstate__(cls, state: object) -> None:
        raise RefusedError(f"gives a state to {cls.name}; it is damaged")

    def __repr__(cls) -> str:
        return cls.name


Names: TypeAlias = Mapping[str, Global]
"""Full names, such as ``torch.float32``, to what stands for them."""


class Record(metaclass=Global):
    """What stands for an object: the name of its class, how it was made and its state.

    Two records are equal only if they are one, so that hashing them looks at nothing inside.
    """

    __slots__ = ("args", "state")

    name: ClassVar[str]
    args: tuple[object, ...]
    state: object

    def __new__(cls, *args: object) -> Self:  # noqa: D102  # described by its class
        made = object.__new__(cls)
        made.args = args
        made.state = None
        return made

    def __setstate__(self, state: object) -> None:
        if self.state is not None:
            raise RefusedError(f"gives a state to <{self.name}>: it has a state already")
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def get(self, key: str) -> object:
        """Return a member of the state; None if it has none of that name."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class StateDict(dict[object, object]):
    """A dict with attributes, such as a state dict's versions; these are left out."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


def record_class(name: str) -> Global:
    """Return a class of records."""
    return Global(name, (Record,), {})


def made_by(name: str, function: Callable[..., object]) -> Global:
    """Return what makes a value of the arguments of a call; it may refuse with `ValueError`."""

    def make(_: type, *args: object) -> object:
        try:
            return function(*args)
        except (TypeError, ValueError) as error:
            raise RefusedError(
                f"calls {name} with arguments that it does not take: {error}; restore the file"
            ) from None

    return Global(name, (), {"__new__": make})


def mere_name(name: str) -> Global:
    """Return what may be named, but not called."""

    def refuse(_: type, *_args: object) -> Never:
        raise RefusedError(f"calls {name}, which is no function; nothing was run")

    return Global(name, (), {"__new__": refuse})


def _no_storage(value: object) -> Never:
    # What nests is named only, for it may hold itself many times over.
    shown = repr(value)[:60] if isinstance(value, str | int) else f"a {type(value).__name__}"
    raise RefusedError(f"refers to {shown}, outside of itself; it is damaged")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Names, persistent: Callable[[object], object]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # as its parent
        full = f"{module}.{name}"
        found = self._names.get(full)
        if found is None:
            raise _UnlistedError(
                f"names {full if full.isprintable() else ascii(full):.200}, which does not belong "
                "in a checkpoint; nothing of it was run. If you trust its writer, save it again as "
                "a state dict of tensors and plain values"
            )
        return found

    def persistent_load(self, pid: object) -> object:
        try:
            return self._persistent(pid)
        except ValueError as error:
            raise RefusedError(f"refers to something outside of itself: {error}") from None


_DAMAGED: Final = (
    *(pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)


def unpickle(
    data: bytes,
    names: Names,
    path: Path | str,
    what: str,
    persistent: Callable[[object], object] = _no_storage,
    screened: Callable[[bytes], None] = screen,
) -> object:
    """Return the value that a pickle describes, made of inert parts.

    Parameters
    ----------
    data, names
        The pickle, and the names that may stand in it: `UnlistedNameError` if it has another one.
    path, what
        For errors: where it comes from, and what it is (``"metadata"``).
    persistent
        Called for every reference to something outside the pickle.
    screened
        Refuses what would hurt.

    Examples
    --------
    >>> unpickle(pickle.dumps({"a": [1, 2.5]}), {}, Path("x"), "example")
    {'a': [1, 2.5]}
    >>> import os
    >>> unpickle(pickle.dumps(os.getcwd), {}, Path("x"), "example")
    Traceback (most recent call last):
    shardspec.checkpoint.torch_files.unpickler.UnlistedNameError: x: the example names \
posix.getcwd, which does not belong in a checkpoint; nothing of it was run. If you trust its \
writer, save it again as a state dict of tensors and plain values
    """
    collects = gc.isenabled()
    try:
        screened(data)
        # The collector would go over millions of new objects, of which all are in use.
        gc.disable()
        return _Unpickler(data, names, persistent).load()
    except _UnlistedError as error:
        raise UnlistedNameError(f"{path}: the {what} {error}") from None
    except RefusedError as error:
        problem = str(error)
    except IndexError:
        problem = "ends too early, or takes away what is not there; it is damaged"
    except UnicodeDecodeError:
        problem = "holds text that is not UTF-8; it is damaged"
    except _DAMAGED as error:
        told = str(error) or type(error).__name__
        told = told if told.isprintable() else ascii(told)
        problem = f"cannot be read ({told:.200}); it is damaged"
    finally:
        if collects:
            gc.enable()
    raise CheckpointError(f"{path}: the {what} {problem}")
