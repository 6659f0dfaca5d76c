"""Pickles read without running them: a small machine with a list of what it knows.

A pickle is a program. Python's own reader imports and calls what the program names; this one looks
every name up in a list that the format gives, and makes inert values. What is not on the list, in
names as in instructions, is refused. Source: Lib/pickletools.py of CPython, which describes every
instruction.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Never, TypeAlias

from shardspec.errors import CheckpointError

__all__ = [
    "MOST_PICKLE_BYTES",
    "Allowed",
    "Builder",
    "Global",
    "Record",
    "UnlistedNameError",
    "as_record",
    "no_storage",
    "unpickle",
]

Builder: TypeAlias = Callable[[tuple[object, ...]], object]
"""Makes a value from the arguments of a call that a pickle states."""
Allowed: TypeAlias = Mapping[str, Builder | None]
"""Full name to what a call of it makes; None where it may be named and not called."""

MOST_PICKLE_BYTES: Final = 256 << 20
"""Of some two million chunks of tensors; more would fill the memory."""
_FREE_OBJECTS: Final = 1 << 20
_BYTES_AN_OBJECT: Final = 12
"""Real pickles take more bytes an object than this; one that is denser is made to fill memory."""
_MOST_INT_BYTES: Final = 64
_MOST_KEY_ITEMS: Final = 64
_MOST_NAME_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to, such as ``torch.float32``; nothing is imported."""

    name: str


class UnlistedNameError(CheckpointError):
    """A pickle is whole, as far as it was read, but names what the list does not have."""


class Record:
    """What stands for an object: the name of its class, how it was made and its state.

    A format may derive from it, to keep less of a state than all. Two records are equal only if
    they are one, so that hashing them looks at nothing inside.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...]) -> None:
        self.name = name
        self.args = args
        self.state: object = None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def build(self, state: object) -> None:
        """Take the state in, which a pickle states once, after the arguments.

        Raises
        ------
        ValueError
            If a class that is derived from this one has no use for it.
        """
        if self.state is not None:
            raise ValueError("it has a state already")
        self.state = state

    def get(self, key: str) -> object:
        """Return a member of the state; None if it has none of that name."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def as_record(name: str) -> Builder:
    """Return a builder of records of that name."""
    return lambda args: Record(name, args)


class _RefusedError(ValueError):
    """What is wrong with the pickle, for `unpickle` to say where."""


class _UnlistedError(_RefusedError):
    """It names what the list does not have."""


def no_storage(value: object) -> Never:
    """Refuse a reference to something outside: the `persistent` of a pickle that stands alone."""
    raise _RefusedError(f"refers to {_shown(value)}, outside of itself; it is damaged")


def _shown(value: object) -> str:
    """Write a value shortly; what nests is named only, for it may hold itself many times over."""
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if value is None or isinstance(value, Global | int | float):
        return repr(value)[:200]
    return f"a {type(value).__name__}"


def unpickle(
    data: bytes,
    allowed: Allowed,
    path: Path | str,
    what: str,
    persistent: Callable[[object], object] = no_storage,
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
    shardspec.checkpoint.pickles.UnlistedNameError: x: the example names posix.getcwd, which does \
not belong in a checkpoint; nothing of it was run. If you trust its writer, save it again as a \
state dict of tensors and plain values
    """
    try:
        return _Machine(data, allowed, persistent).run()
    except _UnlistedError as error:
        raise UnlistedNameError(f"{path}: the {what} {error}") from None
    except _RefusedError as error:
        problem = str(error)
    except (IndexError, struct.error):
        problem = "ends too early, or takes away what is not there; it is damaged"
    except UnicodeDecodeError:
        problem = "holds text that is not UTF-8; it is damaged"
    except RecursionError:
        problem = "nests too deep"
    raise CheckpointError(f"{path}: the {what} {problem}")


class _Machine:
    """The stack machine; one method an instruction."""

    def __init__(
        self, data: bytes, allowed: Allowed, persistent: Callable[[object], object]
    ) -> None:
        if len(data) > MOST_PICKLE_BYTES:
            raise _RefusedError(f"has {len(data)} bytes, past the limit of {MOST_PICKLE_BYTES}")
        self.data = data
        self.at = 0
        self.allowed = allowed
        self.persistent = persistent
        self.stack: list[object] = []
        self.outer: list[list[object]] = []
        self.memo: list[object] = []
        self.left = _FREE_OBJECTS + len(data) // _BYTES_AN_OBJECT

    def run(self) -> object:
        data = self.data
        if data[:1] != b"\x80":
            raise _RefusedError("is no pickle of protocol 2 or later; it is damaged")
        table = _TABLE
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                break
            step = table.get(code)
            if step is None:
                raise _RefusedError(
                    f"uses instruction {bytes((code,))!r} at byte {self.at - 1}, which no "
                    "checkpoint needs; nothing of it was run"
                )
            step(self)
        if len(self.stack) != 1 or self.outer:
            raise _RefusedError("does not end with one value; it is damaged")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise _RefusedError("ends too early; it is truncated")
        part = self.data[self.at : end]
        self.at = end
        return part

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _MOST_NAME_BYTES)
        if end < 0:
            raise _RefusedError("has a name without an end; it is damaged")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8")

    def push(self, value: object) -> None:
        """Push something that takes memory of its own."""
        self.left -= 1
        if self.left < 0:
            raise _RefusedError(
                f"makes more objects than {len(self.data)} bytes of a real one would; it is made "
                "to fill the memory"
            )
        self.stack.append(value)

    def marked(self) -> list[object]:
        """Return what was pushed since the last mark, and forget both."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    # --- plain values

    def proto(self) -> None:
        if not 2 <= self.number(1) <= 5:
            raise _RefusedError("has a protocol other than 2 to 5; it is damaged")

    def frame(self) -> None:
        if self.number(8) > len(self.data) - self.at:
            raise _RefusedError("ends too early; it is truncated")

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def int1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def int2(self) -> None:
        self.stack.append(self.number(2))

    def int4(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def _long(self, size: int) -> None:
        if size > _MOST_INT_BYTES:
            raise _RefusedError(f"holds a whole number of {size} bytes; it is damaged")
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def long1(self) -> None:
        self._long(self.number(1))

    def long4(self) -> None:
        self._long(self.number(4))

    def real(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def text1(self) -> None:
        self.push(self.take(self.number(1)).decode("utf-8", "surrogatepass"))

    def text4(self) -> None:
        self.push(self.take(self.number(4)).decode("utf-8", "surrogatepass"))

    def text8(self) -> None:
        self.push(self.take(self.number(8)).decode("utf-8", "surrogatepass"))

    def bytes1(self) -> None:
        self.push(self.take(self.number(1)))

    def bytes4(self) -> None:
        self.push(self.take(self.number(4)))

    # --- containers

    def mark(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _RefusedError("marks more than a real one would; it is made to fill the memory")
        self.outer.append(self.stack)
        self.stack = []

    def empty_tuple(self) -> None:
        self.stack.append(())

    def tuple_marked(self) -> None:
        self.push(tuple(self.marked()))

    def _tuple(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) != count:
            raise _RefusedError("takes away what is not there; it is damaged")
        del self.stack[-count:]
        self.push(items)

    def tuple1(self) -> None:
        self._tuple(1)

    def tuple2(self) -> None:
        self._tuple(2)

    def tuple3(self) -> None:
        self._tuple(3)

    def empty_list(self) -> None:
        self.push([])

    def empty_dict(self) -> None:
        self.push({})

    def empty_set(self) -> None:
        # A list does for what is only shown.
        self.push([])

    def frozen_set(self) -> None:
        self.push(self.marked())

    def append(self) -> None:
        item = self.stack.pop()
        self._extend([item])

    def appends(self) -> None:
        self._extend(self.marked())

    def _extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise _RefusedError(f"appends to {_shown(target)}, which is no list; it is damaged")
        target.extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self.marked())

    def _update(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise _RefusedError("sets items of what is no dict; it is damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(key)
            target[key] = value

    # --- the memo

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def _put(self, place: int) -> None:
        # Writers number from 0 without gaps.
        if place > len(self.memo):
            raise _RefusedError(f"numbers an object {place} after {len(self.memo)} of them")
        if place == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            self.memo[place] = self.stack[-1]

    def put1(self) -> None:
        self._put(self.number(1))

    def put4(self) -> None:
        self._put(self.number(4))

    def get1(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def get4(self) -> None:
        self.stack.append(self.memo[self.number(4)])

    # --- names, calls and references

    def name_lines(self) -> None:
        module = self.line()
        self._name(module, self.line())

    def name_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _RefusedError("names something by what is no text; it is damaged")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self.allowed:
            shown = full if full.isprintable() else ascii(full)
            raise _UnlistedError(
                f"names {shown:.200}, which does not belong in a checkpoint; nothing of it was "
                "run. If you trust its writer, save it again as a state dict of tensors and "
                "plain values"
            )
        self.push(Global(full))

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise _RefusedError(f"calls {_shown(function)}, which is no name; nothing was run")
        builder = self.allowed[function.name]
        if builder is None:
            raise _RefusedError(f"calls {function.name}, which is no function; nothing was run")
        try:
            self.push(builder(args))
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:
            raise _RefusedError(
                f"calls {function.name} with arguments that it does not take: {error}"
            ) from None

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            try:
                target.build(state)
            except (TypeError, ValueError) as error:
                raise _RefusedError(f"gives a state to <{target.name}>: {error}") from None
        elif not isinstance(target, dict):
            # The attributes of an ordered dict, such as a state dict's versions, are left out.
            raise _RefusedError(f"gives a state to {_shown(target)}; it is damaged")

    def reference(self) -> None:
        try:
            self.push(self.persistent(self.stack.pop()))
        except ValueError as error:
            raise _RefusedError(f"refers to something outside of itself: {error}") from None


def _check_key(key: object) -> None:
    """Admit keys that are quick to hash, whatever is in the pickle."""
    if isinstance(key, tuple):
        if len(key) > _MOST_KEY_ITEMS or any(isinstance(item, tuple) for item in key):
            raise _RefusedError("has a nested tuple as a key")
        for item in key:
            _check_key(item)
    elif not isinstance(key, str | bytes | int | float | Record | Global | None):
        raise _RefusedError(f"has {_shown(key)} as a key")
    elif isinstance(key, int) and key.bit_length() > 63:
        raise _RefusedError("has a number of more than 63 bits as a key")


_STOP: Final = ord(".")
_TABLE: Final[Mapping[int, Callable[[_Machine], None]]] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("N"): _Machine.none,
    0x88: _Machine.true,
    0x89: _Machine.false,
    ord("K"): _Machine.int1,
    ord("M"): _Machine.int2,
    ord("J"): _Machine.int4,
    0x8A: _Machine.long1,
    0x8B: _Machine.long4,
    ord("G"): _Machine.real,
    0x8C: _Machine.text1,
    ord("X"): _Machine.text4,
    0x8D: _Machine.text8,
    ord("C"): _Machine.bytes1,
    ord("B"): _Machine.bytes4,
    ord("("): _Machine.mark,
    ord(")"): _Machine.empty_tuple,
    ord("t"): _Machine.tuple_marked,
    0x85: _Machine.tuple1,
    0x86: _Machine.tuple2,
    0x87: _Machine.tuple3,
    ord("]"): _Machine.empty_list,
    ord("}"): _Machine.empty_dict,
    0x8F: _Machine.empty_set,
    0x90: _Machine.appends,
    0x91: _Machine.frozen_set,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    0x94: _Machine.memoize,
    ord("q"): _Machine.put1,
    ord("r"): _Machine.put4,
    ord("h"): _Machine.get1,
    ord("j"): _Machine.get4,
    ord("c"): _Machine.name_lines,
    0x93: _Machine.name_stack,
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.reference,
}
"""Calling and making an object are one: both make what the list says."""
