"""Reads pickles without importing or calling anything that they name.

One loop executes the instructions that checkpoints need and refuses others. A name on an allow-list
is replaced by a class of ours that stores its arguments or makes a plain value of them. A pickle
cannot change these classes and values. Other names are refused, or replaced by `Foreign` objects,
which only store their arguments and items.
Limits on bytes, instructions, nesting and keys bound memory and time. Lib/pickletools.py of CPython
describes the instructions.
"""

import gc
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, ClassVar, Final, Never, Self, TypeAlias

from shardspec.errors import CheckpointError
from shardspec.text import printable, shown

MAX_PICKLE_BYTES: Final = 256 << 20
_ROOM_BYTES: Final = 320 << 20
"""Maximum memory of the values of a pickle."""
_MAX_BYTES: Final = 448 << 20
"""Maximum memory of a pickle and its values together."""
_PLACE_BYTES: Final = 16
_COSTS: Final = [_PLACE_BYTES] * 256
"""Approximate bytes of memory for the result of each instruction and its stack entry."""
for _codes, _num_bytes in {
    b"\x94qr": 10,
    b"(": 40,
    b"MJ\x8a\x8bG": 48,
    b"CB": 64,
    b"\x8cX\x8d": 92,
    b"}]": 80,
    b"\x8f": 240,
    b"sua\x90": 40,
    b"t\x85\x86\x87e\x91": 72,
    b"R\x81Q": 72,
    b"c\x93": 1100,  # the class that a name stands for
    b"b": 0,
}.items():
    for _code in _codes:
        _COSTS[_code] = _num_bytes
_ITEM_COSTS: Final = dict.fromkeys(b"su", 50) | dict.fromkeys(b"\x90\x91", 110)
"""Approximate bytes of memory per item of a dict or set; items of others take 8."""
_MAX_INT_BYTES: Final = 64
_MAX_KEY_PARTS: Final = 66
_MAX_COLLIDING: Final = 10_000
"""Limit of tuples as keys, and of numbers over 64 bits: many could have equal hashes."""
_SIZES: Final = {b"Kqh\x8cC\x8a": 1, b"M": 2, b"JrjXB\x8b": 4, b"G\x8d\x95": 8}
_ARGUMENT_BYTES: Final = [
    sum(n for codes, n in _SIZES.items() if code in codes) for code in range(256)
]
"""Bytes of the number after each instruction; it may be the length of further data."""
_CONSTANTS: Final[dict[int, object]] = {0x4E: None, 0x29: (), 0x88: True, 0x89: False}
_EMPTY: Final[dict[int, Callable[[], object]]] = {0x7D: dict, 0x5D: list, 0x8F: set}
_TAKES: Final = dict.fromkeys(b"tue\x90\x91", 0) | {0x85: 1, 0x86: 2, 0x87: 3, 0x73: 2, 0x61: 1}
"""Values that an instruction takes from the stack; 0 for all after the last mark."""
_DOUBLE: Final = struct.Struct(">d")
_STARTS: Final = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")
_DAMAGED: Final = "is not as pickle writes it; it is damaged, restore it"
_TOO_MUCH: Final = "needs more memory or time than a checkpoint does"


class RefusedError(Exception):
    """The problem of a pickle; `unpickle` adds the path of the file to the message."""


class PickleError(CheckpointError):
    """A pickle is damaged, too large, or has names or instructions that no checkpoint needs."""


class Global(type):
    """Inert class that replaces a name in a pickle."""

    name: str
    path: str  # module and name

    def __new__(  # noqa: D102  # described by its class
        cls, name: str, bases: tuple[type, ...], members: dict[str, object]
    ) -> "Global":
        members = {"__slots__": (), "name": name, "path": name, **members}
        return super().__new__(cls, name, bases, members)

    def __setattr__(cls, key: str, value: object) -> None:
        raise RefusedError(_DAMAGED)

    def __setstate__(cls, state: object) -> None:
        raise RefusedError(_DAMAGED)

    def __repr__(cls) -> str:
        return cls.name


PickledNames: TypeAlias = Mapping[str, Global]
"""Full name, such as ``torch.float32`` -> the class that replaces it."""


class Record(metaclass=Global):
    """Stands for an object: the name of its class, arguments and state; compared by identity."""

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
        _require(self.state is None)
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def get(self, key: str) -> object:
        """Return a member of the state; None if there is none of that name."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class UnsupportedError(ValueError):
    """An intact value that cannot be read; the message has the remedy."""


class Foreign(Record):
    """Stands for an object of a class that is not on the list, and for results of calling it."""

    __slots__ = ("more",)

    more: list[object] | None
    """Items, and further states."""

    def __new__(cls, *args: object) -> Self:  # noqa: D102  # described by its class
        made = super().__new__(cls, *args)
        made.more = None
        return made

    def __setstate__(self, state: object) -> None:
        if self.state is None:
            self.state = state
        else:
            self.append(state)

    def __call__(self, *args: object) -> Self:
        """Return an object that stands for the result of a call."""
        return type(self)(self, *args)

    def __setitem__(self, key: object, value: object) -> None:
        self.append((key, value))

    def append(self, item: object) -> None:
        """Store an item that the pickle appends to the object."""
        self.extend((item,))

    def extend(self, items: Iterable[object]) -> None:
        """Store items that the pickle appends to the object."""
        self.more = [] if self.more is None else self.more
        self.more.extend(items)

    update = extend


class StateDict(dict[object, object]):
    """A dict that drops its attributes, such as the versions of a module's state dict."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


def record_class(path: str, name: str = "") -> Global:
    """Return a class of records, called by its path or by a shorter name.

    >>> record_class("torch.device", "device")("cpu").args
    ('cpu',)
    """
    return Global(name or path, (Record,), {"path": path})


def foreign_class(path: str) -> Global:
    """Return the class that replaces a name which is not on the allow-list."""
    return Global(path, (Foreign,), {})


def made_by(name: str, function: Callable[..., object]) -> Global:
    """Return a class whose call in a pickle calls `function`, which may raise `ValueError`."""

    def make(_: type, *args: object) -> object:
        try:
            return function(*args)
        except UnsupportedError as error:
            raise RefusedError(f"contains an unsupported value: {error}") from None
        except (TypeError, UnicodeError):  # in messages of Python itself
            problem = ""
        except ValueError as error:
            problem = f": {error}"
        raise RefusedError(
            f"calls {name} with arguments that it does not take{problem}; it is damaged, restore it"
        )

    return Global(name, (), {"__new__": make})


def mere_name(name: str) -> Global:
    """Return a class that a pickle may name, but not call."""

    def refuse(*_: object) -> Never:
        raise RefusedError(f"calls {name}, which is not a function; nothing was run")

    return made_by(name, refuse)


def _no_storage(value: object) -> Never:
    # A nested value could contain itself many times, so only its type is named.
    text = shown(value, 60) if isinstance(value, str | int) else f"a {type(value).__name__}"
    raise RefusedError(f"refers to {text}, which is not in the file; it is damaged")


class _Unpickler:
    """Makes the value of one pickle."""

    def __init__(
        self,
        data: bytes,
        names: PickledNames,
        persistent: Callable[[object], object],
        *,
        foreign: bool,
        room_bytes: int,
    ) -> None:
        self._data, self._names, self._persistent = data, dict(names), persistent
        self._foreign, self._room_bytes = foreign, room_bytes
        self._colliding = 0
        """Number of tuple keys and long numbers so far."""

    def _named(self, module: object, name: object) -> Global:
        _require(isinstance(module, str) and isinstance(name, str))
        path = f"{module}.{name}"
        if path not in self._names:
            if not self._foreign:
                raise RefusedError(
                    f"names {printable(f'{module}.{name:.200}'):.200}, which does not belong in a "
                    "checkpoint; nothing of it was run. If you trust its author, save it "
                    "again as tensors and plain values"
                )
            self._names[path] = foreign_class(path)
        return self._names[path]

    def _outside(self, pid: object) -> object:
        try:
            return self._persistent(pid)
        except UnsupportedError as error:
            raise RefusedError(f"contains an unsupported value: {error}") from None
        except ValueError as error:
            raise RefusedError(f"refers to something outside of the file: {error}") from None

    def _check_keys(self, keys: list[Any]) -> None:
        """Refuse keys that take long to hash, and many keys that could have equal hashes."""
        for key in keys:
            if type(key) is tuple:
                self._count_colliding()
                todo, parts = [key], 0
                while todo:
                    part = todo.pop()
                    parts += len(part)
                    if parts > _MAX_KEY_PARTS:
                        raise RefusedError(_TOO_MUCH)
                    todo += [inner for inner in part if type(inner) is tuple]

    def _count_colliding(self) -> None:
        self._colliding += 1
        if self._colliding > _MAX_COLLIDING:
            raise RefusedError(_TOO_MUCH)

    def _long(self, data: bytes, count: int) -> int:
        if count > 8:
            self._count_colliding()
        if count > _MAX_INT_BYTES:
            raise RefusedError(_TOO_MUCH)
        return int.from_bytes(data, "little", signed=True)

    def _fill(self, target: object, items: list[Any], code: int) -> None:
        """Carry out an instruction that adds items to a dict, a list or a set."""
        if code in b"ae" and isinstance(target, (list, Foreign)):
            target.extend(items)
        elif code in b"su" and isinstance(target, (dict, Foreign)):
            keys = items[::2]
            self._check_keys(keys)
            target.update(zip(keys, items[1::2], strict=True))
        elif code == 0x90 and isinstance(target, (set, Foreign)):
            self._check_keys(items)
            target.update(items)
        else:
            raise TypeError

    def load(self) -> object:  # noqa: C901  # a case an opcode
        """Return the value of the pickle; raises RefusedError, or one of `_DAMAGE_ERRORS`."""
        data = self._data
        if len(data) > MAX_PICKLE_BYTES:
            raise RefusedError(_TOO_MUCH)
        _require(data.startswith(_STARTS))
        stack: list[Any] = []
        memo: list[Any] = []
        marks: list[int] = []
        push, memoize, number = stack.append, memo.append, int.from_bytes
        sizes, costs = _ARGUMENT_BYTES, _COSTS
        room = self._room_bytes
        at = 2
        # After an argument past the end, `data[at]` fails. Frequent instructions come first.
        while room >= 0:
            code = data[at]
            at += 1
            room -= costs[code]
            if size := sizes[code]:
                count = data[at] if size == 1 else number(data[at : at + size], "little")
                at += size
                if code in b"hj":  # BINGET, LONG_BINGET
                    push(memo[count])
                elif code in b"KM":  # BININT1, BININT2
                    push(count)
                elif code in b"qr":  # BINPUT, LONG_BINPUT
                    if count == len(memo):
                        memoize(stack[-1])
                    else:
                        memo[count] = stack[-1]
                elif code in b"\x8cX\x8d":  # texts
                    push(data[at : at + count].decode("utf-8", "surrogatepass"))
                    at += count
                    room -= 4 * min(count, len(data))
                elif code == 0x4A:  # BININT
                    push(count - ((count & 1 << 31) << 1))
                elif code == 0x47:  # BINFLOAT
                    push(_DOUBLE.unpack(data[at - 8 : at])[0])
                elif code in b"CB":  # bytes
                    push(data[at : at + count])
                    at += count
                    room -= min(count, len(data))
                elif code in b"\x8a\x8b":  # LONG1, LONG4
                    push(self._long(data[at : at + count], count))
                    at += count
                else:  # FRAME
                    _require(at + count <= len(data))
            elif code == 0x94:  # MEMOIZE
                memoize(stack[-1])
            elif code in _CONSTANTS:
                push(_CONSTANTS[code])
            elif code in _EMPTY:
                push(_EMPTY[code]())
            elif code == 0x28:  # MARK
                marks.append(len(stack))
            elif code in _TAKES:  # the items of tuples and containers
                first = len(stack) - _TAKES[code] if _TAKES[code] else marks.pop()
                _require(first >= 0)
                items = stack[first:]
                del stack[first:]
                room -= (_ITEM_COSTS.get(code, 8) - _PLACE_BYTES) * len(items)
                if code in b"t\x85\x86\x87":
                    push(tuple(items))
                elif code == 0x91:  # FROZENSET
                    self._check_keys(items)
                    push(frozenset(items))
                else:
                    self._fill(stack[-1], items, code)
            elif code in b"R\x81":  # REDUCE, NEWOBJ
                args, kind = stack.pop(), stack[-1]
                called = isinstance(kind, Global) or (code == 0x52 and isinstance(kind, Foreign))
                if type(args) is not tuple or not called:
                    raise TypeError
                stack[-1] = kind(*args) if code == 0x52 else kind.__new__(kind, *args)
            elif code == 0x62:  # BUILD
                state, made = stack.pop(), stack[-1]
                if not isinstance(made, (Record, Global, StateDict)):
                    raise TypeError
                inert: Any = type(made)
                inert.__setstate__(made, state)
            elif code == 0x51:  # BINPERSID
                stack[-1] = self._outside(stack[-1])
            elif code == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                stack[-1] = self._named(stack[-1], name)
            elif code == 0x63:  # GLOBAL: two lines
                middle = data.index(b"\n", at)
                end = data.index(b"\n", middle + 1)
                push(self._named(data[at:middle].decode(), data[middle + 1 : end].decode()))
                at = end + 1
            elif code == 0x2E:  # STOP
                _require(len(stack) == 1 and not marks)
                return stack[0]
            else:
                raise RefusedError(
                    f"uses instruction {bytes((code,))!r} at byte {at - 1}, which no checkpoint "
                    "needs; nothing of it was run"
                )
        raise RefusedError(_TOO_MUCH)


def _require(fits: bool) -> None:
    if not fits:
        raise RefusedError(_DAMAGED)


_DAMAGE_ERRORS: Final = (
    *(LookupError, TypeError, ValueError, AttributeError, struct.error),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""Exceptions that a damaged pickle can cause."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause Python's garbage collector: it would visit millions of objects, all of them in use."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def unpickle(
    data: bytes,
    names: PickledNames,
    path: PurePath | str,
    title: str,
    persistent: Callable[[object], object] = _no_storage,
    *,
    foreign: bool = False,
    room_per_byte: int = 0,
) -> object:
    r"""Return the value of a pickle, with its names replaced by the classes in `names`.

    `path` and `title` (``"metadata"``) are for errors. `persistent` resolves references to objects
    outside the pickle. Names that are not listed become `Foreign` objects if `foreign` is set, and
    are refused otherwise. The memory limit of the values is `room_per_byte` per byte, or a fixed
    amount if that is larger. Raises PickleError if the pickle is refused or damaged.

    >>> unpickle(b"\x80\x02]K\x01a.", {}, "a.pt", "pickle")
    [1]
    """
    try:
        with no_collection():
            room = min(_ROOM_BYTES, _MAX_BYTES - len(data))
            room = max(room, room_per_byte * len(data))
            made = _Unpickler(data, names, persistent, foreign=foreign, room_bytes=room)
            return made.load()
    except RefusedError as error:
        problem = str(error)
    except UnicodeDecodeError:
        problem = "contains text that is not UTF-8; it is damaged"
    except _DAMAGE_ERRORS:
        problem = _DAMAGED
    raise PickleError(f"{path}: the {title} {problem}")
