"""Pickles read without running them: a small machine with a list of what it knows.

A pickle is a program. Python's own reader imports and calls what the program names; this one looks
every name up in a list that the format gives, and makes inert values. What is not on the list, in
names as in instructions, is refused. Source: Lib/pickletools.py of CPython, which describes every
instruction.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Never

from shardspec.checkpoint.torch_files.pickle_machine import (
    MOST_PICKLE_BYTES,
    RefusedError,
    UnlistedError,
    run_pickle,
    shown,
)
from shardspec.checkpoint.torch_files.pickle_values import (
    Allowed,
    Builder,
    Global,
    Record,
    Shortcut,
    Shortcuts,
    Trace,
    as_record,
)
from shardspec.errors import CheckpointError

__all__ = [
    "MOST_PICKLE_BYTES",
    "Allowed",
    "Builder",
    "Global",
    "Record",
    "Shortcut",
    "Shortcuts",
    "UnlistedNameError",
    "as_record",
    "no_storage",
    "unpickle",
]


class UnlistedNameError(CheckpointError):
    """A pickle is whole, as far as it was read, but names what the list does not have."""


def no_storage(value: object) -> Never:
    """Refuse a reference to something outside: the `persistent` of a pickle that stands alone."""
    raise RefusedError(f"refers to {shown(value)}, outside of itself; it is damaged")


def unpickle(
    data: bytes,
    allowed: Allowed,
    path: Path | str,
    what: str,
    persistent: Callable[[object], object] = no_storage,
    shortcuts: Shortcuts | None = None,
    trace: Trace | None = None,
) -> object:
    """Return the value that a pickle describes, made of inert parts.

    Parameters
    ----------
    data
        The pickle.
    allowed
        The names that may stand in it.
    path, what
        For errors: where it comes from, and what it is (``"metadata"``).
    persistent
        Called for every reference to something outside the pickle.
    shortcuts
        For objects that come by the thousand, by full name; the result is as without.
    trace
        Takes note of what others need to know that end alike.

    Returns
    -------
    object
        Plain values, lists, tuples and dicts, `Global`, `Record`, and what builders have made.

    Raises
    ------
    UnlistedNameError
        If the pickle names anything else.
    CheckpointError
        If it uses an instruction that no checkpoint needs, is damaged, or would fill the memory.

    Examples
    --------
    >>> import pickle
    >>> unpickle(pickle.dumps({"a": [1, 2.5]}), {}, Path("x"), "example")
    {'a': [1, 2.5]}
    >>> import os
    >>> unpickle(pickle.dumps(os.getcwd), {}, Path("x"), "example")
    Traceback (most recent call last):
    shardspec.checkpoint.torch_files.pickles.UnlistedNameError: x: the example names posix.getcwd, \
which does not belong in a checkpoint; nothing of it was run. If you trust its writer, save it \
again as a state dict of tensors and plain values
    """
    try:
        return run_pickle(data, allowed, persistent, shortcuts, trace)
    except UnlistedError as error:
        raise UnlistedNameError(f"{path}: the {what} {error}") from None
    except RefusedError as error:
        problem = str(error)
    except IndexError:
        problem = "ends too early, or takes away what is not there; it is damaged"
    except UnicodeDecodeError:
        problem = "holds text that is not UTF-8; it is damaged"
    except RecursionError:
        problem = "nests too deep"
    raise CheckpointError(f"{path}: the {what} {problem}")
