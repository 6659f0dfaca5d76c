"""The machine that reads pickles: one method an instruction, and an account of the memory."""

import struct
from collections.abc import Callable, Mapping
from typing import Final, Never, TypeAlias

from shardspec.checkpoint.torch_files.pickle_values import (
    Allowed,
    Global,
    Halfway,
    Record,
    Shortcut,
    Shortcuts,
    Trace,
)
from shardspec.errors import CheckpointError

__all__ = [
    "MOST_PICKLE_BYTES",
    "RefusedError",
    "UnlistedError",
    "run_head",
    "run_pickle",
    "shown",
]

MOST_PICKLE_BYTES: Final = 256 << 20
"""Of some two million chunks of tensors; more would fill the memory."""
_FREE_BYTES: Final = 48 << 20
_BYTES_A_BYTE: Final = 16
"""What a pickle may take of memory for each of its bytes, beyond what is free; checkpoints that
list many chunks take 12. One that takes more is made to fill the memory."""
_MOST_MARKS: Final = 10_000
# What values take of memory, about, in bytes.
_SMALL: Final = 32
_OBJECT: Final = 96
_CONTAINER: Final = 64
_FIRST_PAIRS: Final = 168
_FEW_PAIRS: Final = 5
_PAIR: Final = 64
_SLOT: Final = 8
_MOST_BYTES_A_LETTER: Final = 4
_MOST_INT_BYTES: Final = 64
_MOST_KEY_ITEMS: Final = 64
_MOST_NAME_BYTES: Final = 512
_KEYS: Final = (str, bytes, int, float, Record, Global, type(None))
_NUMBERED: Final = b"\x81\x94"
"""NEWOBJ and MEMOIZE: what makes an object for which there may be a shortcut."""
_STOP: Final = b"."
_TRUNCATED: Final = "ends too early; it is truncated"
_NUMBER: Final = struct.Struct("<L").unpack_from
_SIGNED: Final = struct.Struct("<l").unpack_from
_SHORT: Final = struct.Struct("<H").unpack_from


class RefusedError(ValueError):
    """What is wrong with the pickle; `unpickle` says where."""


class UnlistedError(RefusedError):
    """It names what the list does not have."""


def shown(value: object) -> str:
    """Write a value shortly; what nests is named only, for it may hold itself many times over."""
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if value is None or isinstance(value, Global | int | float):
        return repr(value)[:200]
    return f"a {type(value).__name__}"


def run_pickle(
    data: bytes,
    allowed: Allowed,
    persistent: Callable[[object], object],
    shortcuts: Shortcuts | None = None,
    trace: Trace | None = None,
) -> object:
    """Return the value that a pickle describes; see `unpickle`.

    Raises
    ------
    RefusedError
        If it is not what a checkpoint holds.
    IndexError, UnicodeDecodeError, RecursionError
        If it is damaged.
    """
    machine = _Machine(data, allowed, persistent, shortcuts or {})
    if trace is not None:
        machine.memo, machine.trace = trace.memo, trace
    machine.run()
    if len(machine.stack) != 1 or machine.outer:
        raise RefusedError("does not end with one value; it is damaged")
    return machine.stack[0]


def run_head(
    data: bytes, end: int, allowed: Allowed, persistent: Callable[[object], object]
) -> Halfway | None:
    """Follow the instructions of a pickle up to a place; None if one stops before, or cannot be.

    Parameters
    ----------
    data, allowed, persistent
        As for `unpickle`.
    end
        A place between two instructions.

    Raises
    ------
    RefusedError, IndexError, UnicodeDecodeError, RecursionError
        As by `run_pickle`.
    """
    machine = _Machine(data[:end] + _STOP, allowed, persistent, {})
    return Halfway(machine.memo, (*machine.outer, machine.stack)) if machine.run() > end else None


class _Machine:
    """The stack machine; one method an instruction, but for those that come by the thousand."""

    def __init__(
        self,
        data: bytes,
        allowed: Allowed,
        persistent: Callable[[object], object],
        shortcuts: Shortcuts,
    ) -> None:
        if len(data) > MOST_PICKLE_BYTES:
            raise RefusedError(f"has {len(data)} bytes, past the limit of {MOST_PICKLE_BYTES}")
        self.data = data
        self.at = 0
        self.allowed = allowed
        self.persistent = persistent
        self.stack: list[object] = []
        self.outer: list[list[object]] = []
        self.memo: list[object] = []
        self.left = _FREE_BYTES + len(data) * _BYTES_A_BYTE
        self.names: dict[str, Global] = {}
        self.shortcuts = shortcuts
        self.short: dict[int, Shortcut] = {}
        """By the id of what `names` holds."""
        self.trace: Trace | None = None

    def run(self) -> int:
        """Follow the instructions, and return where the one that says stop ends."""
        try:
            return self._run()
        except struct.error:
            raise RefusedError(_TRUNCATED) from None

    def _run(self) -> int:
        data = self.data
        if data[:1] != b"\x80":
            raise RefusedError("is no pickle of protocol 2 or later; it is damaged")
        steps = _STEPS
        memo, stack, at, short = self.memo, self.stack, self.at, self.short
        while True:
            code = data[at]
            at += 1
            step = steps[code]
            if step is not None:
                self.at = at
                step(self)
                at, stack = self.at, self.stack
                continue
            # Most of a pickle numbers values, takes them up again and states small numbers: done
            # here, without a call, that takes half the time.
            match code:
                case 0x94:  # MEMOIZE
                    memo.append(stack[-1])
                case 0x68:  # BINGET
                    stack.append(memo[data[at]])
                    at += 1
                case 0x72:  # LONG_BINPUT
                    (place,) = _NUMBER(data, at)
                    at += 4
                    if place == len(memo):
                        memo.append(stack[-1])
                    else:
                        self.put_again(place)
                case 0x6A:  # LONG_BINGET
                    stack.append(memo[_NUMBER(data, at)[0]])
                    at += 4
                case 0x4B:  # BININT1
                    stack.append(data[at])
                    at += 1
                case 0x28:  # MARK
                    if len(self.outer) >= _MOST_MARKS:
                        raise RefusedError(f"nests more than {_MOST_MARKS} deep")
                    self.outer.append(stack)
                    self.stack = stack = []
                case 0x4D:  # BININT2
                    stack.append(_SHORT(data, at)[0])
                    at += 2
                case 0x29:  # EMPTY_TUPLE
                    made = None
                    if short and stack and data[at : at + 2] == _NUMBERED:
                        found = short.get(id(stack[-1]))
                        made = None if found is None else found(data, at, memo)
                    if made is None:
                        stack.append(())
                    else:
                        stack[-1], at, num_bytes = made
                        self.left -= num_bytes
                        if self.left < 0:
                            self.refuse_memory()
                case 0x89:  # NEWFALSE
                    stack.append(False)
                case 0x71:  # BINPUT
                    place = data[at]
                    at += 1
                    if place == len(memo):
                        memo.append(stack[-1])
                    else:
                        self.put_again(place)
                case 0x4E:  # NONE
                    stack.append(None)
                case 0x2E:  # STOP
                    return at
                case _:
                    raise RefusedError(
                        f"uses instruction {bytes((code,))!r} at byte {at - 1}, which no "
                        "checkpoint needs; nothing of it was run"
                    )

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise RefusedError(_TRUNCATED)
        part = self.data[self.at : end]
        self.at = end
        return part

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _MOST_NAME_BYTES)
        if end < 0:
            raise RefusedError("has a name without an end; it is damaged")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8")

    def push(self, value: object, num_bytes: int = _OBJECT) -> None:
        """Push something that takes memory of its own."""
        self.left -= num_bytes
        if self.left < 0:
            self.refuse_memory()
        self.stack.append(value)

    def take_memory(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            self.refuse_memory()

    def refuse_memory(self) -> Never:
        raise RefusedError(
            f"makes larger objects than {len(self.data)} bytes of a real one would; it is made "
            "to fill the memory"
        )

    def marked(self) -> list[object]:
        """Return what was pushed since the last mark, and forget both."""
        items = self.stack
        self.stack = self.outer.pop()
        return items

    # --- plain values

    def proto(self) -> None:
        if not 2 <= self.number(1) <= 5:
            raise RefusedError("has a protocol other than 2 to 5; it is damaged")

    def frame(self) -> None:
        if self.number(8) > len(self.data) - self.at:
            raise RefusedError(_TRUNCATED)

    def true(self) -> None:
        self.stack.append(True)

    def int4(self) -> None:
        self.stack.append(_SIGNED(self.data, self.at)[0])
        self.at += 4

    def _long(self, size: int) -> None:
        if size > _MOST_INT_BYTES:
            raise RefusedError(f"holds a whole number of {size} bytes; it is damaged")
        self.push(int.from_bytes(self.take(size), "little", signed=True), _SMALL + size)

    def long1(self) -> None:
        self._long(self.number(1))

    def long4(self) -> None:
        self._long(self.number(4))

    def real(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0], _SMALL)

    def text1(self) -> None:
        self._text(self.number(1))

    def text4(self) -> None:
        (size,) = _NUMBER(self.data, self.at)
        self.at += 4
        self._text(size)

    def text8(self) -> None:
        self._text(self.number(8))

    def _text(self, size: int) -> None:
        data = self.take(size)
        # One letter in many bytes makes all of them as wide.
        width = 1 if data.isascii() else _MOST_BYTES_A_LETTER
        self.push(data.decode("utf-8", "surrogatepass"), _CONTAINER + width * size)

    def bytes1(self) -> None:
        data = self.take(self.number(1))
        self.push(data, _SMALL + len(data))

    def bytes4(self) -> None:
        data = self.take(self.number(4))
        self.push(data, _SMALL + len(data))

    # --- containers

    def tuple_marked(self) -> None:
        items = self.marked()
        self.push(tuple(items), _CONTAINER + _SLOT * len(items))

    def tuple1(self) -> None:
        self._tuple(1)

    def tuple2(self) -> None:
        self._tuple(2)

    def tuple3(self) -> None:
        self._tuple(3)

    def _tuple(self, count: int) -> None:
        stack = self.stack
        items = tuple(stack[-count:])
        if len(items) != count:
            raise RefusedError("takes away what is not there; it is damaged")
        del stack[-count:]
        self.left -= _CONTAINER + _SLOT * count
        if self.left < 0:
            self.refuse_memory()
        stack.append(items)

    def empty_list(self) -> None:
        self.push([], _CONTAINER)

    def empty_dict(self) -> None:
        self.push({}, _CONTAINER)

    def empty_set(self) -> None:
        # A list does for what is only shown.
        self.push([], _CONTAINER)

    def frozen_set(self) -> None:
        items = self.marked()
        self.push(items, _CONTAINER + _SLOT * len(items))

    def append(self) -> None:
        item = self.stack.pop()
        self._extend([item])

    def appends(self) -> None:
        self._extend(self.marked())

    def _extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise RefusedError(f"appends to {shown(target)}, which is no list; it is damaged")
        self.take_memory(_SLOT * len(items))
        target.extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self.marked())

    def _update(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise RefusedError("sets items of what is no dict; it is damaged")
        pairs = len(items) // 2
        if not target:
            self.left -= _FIRST_PAIRS
        if len(target) + pairs > _FEW_PAIRS:
            self.left -= _PAIR * pairs
        if self.left < 0:
            self.refuse_memory()
        rest = iter(items)
        for key in rest:
            if type(key) is not str and not isinstance(key, Record):
                _check_key(key)
            target[key] = next(rest)

    # --- the memo

    def put_again(self, place: int) -> None:
        """Give a value a number that is not the next one."""
        # Writers number from 0 without gaps.
        if place > len(self.memo):
            raise RefusedError(f"numbers an object {place} after {len(self.memo)} of them")
        self.memo[place] = self.stack[-1]
        # Shortcuts rely on numbers that keep what they have.
        self.short.clear()

    # --- names, calls and references

    def name_lines(self) -> None:
        module = self.line()
        self._name(module, self.line())

    def name_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise RefusedError("names something by what is no text; it is damaged")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self.allowed:
            shown = full if full.isprintable() else ascii(full)
            raise UnlistedError(
                f"names {shown:.200}, which does not belong in a checkpoint; nothing of it was "
                "run. If you trust its writer, save it again as a state dict of tensors and "
                "plain values"
            )
        named = self.names.get(full)
        if named is None:
            named = self.names[full] = Global(full)
            if full in self.shortcuts:
                self.short[id(named)] = self.shortcuts[full]()
        self.stack.append(named)

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise RefusedError(f"calls {shown(function)}, which is no name; nothing was run")
        if self.trace is not None:
            self.trace.end(self.at)
        builder = self.allowed[function.name]
        if builder is None:
            raise RefusedError(f"calls {function.name}, which is no function; nothing was run")
        try:
            self.push(builder(args))
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:
            raise RefusedError(
                f"calls {function.name} with arguments that it does not take: {error}"
            ) from None

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            try:
                target.build(state)
            except (TypeError, ValueError) as error:
                raise RefusedError(f"gives a state to <{target.name}>: {error}") from None
        elif not isinstance(target, dict):
            # The attributes of an ordered dict, such as a state dict's versions, are left out.
            raise RefusedError(f"gives a state to {shown(target)}; it is damaged")

    def reference(self) -> None:
        try:
            self.push(self.persistent(self.stack.pop()))
        except ValueError as error:
            raise RefusedError(f"refers to something outside of itself: {error}") from None


def _check_key(key: object) -> None:
    """Admit keys that are quick to hash, whatever is in the pickle."""
    if isinstance(key, tuple):
        if len(key) > _MOST_KEY_ITEMS or any(isinstance(item, tuple) for item in key):
            raise RefusedError("has a nested tuple as a key")
        for item in key:
            _check_key(item)
    elif not isinstance(key, _KEYS):
        raise RefusedError(f"has {shown(key)} as a key")
    elif isinstance(key, int) and key.bit_length() > 63:
        raise RefusedError("has a number of more than 63 bits as a key")


_Step: TypeAlias = Callable[[_Machine], None]
_TABLE: Final[Mapping[int, _Step]] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    0x88: _Machine.true,
    ord("J"): _Machine.int4,
    0x8A: _Machine.long1,
    0x8B: _Machine.long4,
    ord("G"): _Machine.real,
    0x8C: _Machine.text1,
    ord("X"): _Machine.text4,
    0x8D: _Machine.text8,
    ord("C"): _Machine.bytes1,
    ord("B"): _Machine.bytes4,
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
    ord("c"): _Machine.name_lines,
    0x93: _Machine.name_stack,
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.reference,
}
"""Calling and making an object are one: both make what the list says."""
_STEPS: Final[tuple[_Step | None, ...]] = tuple(map(_TABLE.get, range(256)))
