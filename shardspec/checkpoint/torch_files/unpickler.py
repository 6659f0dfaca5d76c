"""Pickles read without importing or calling anything that they name.

Python's own unpickler reads them, and looks names up in a list. There a name stands for an inert
class of ours, which keeps its arguments or makes a plain value of them. No instruction can change
these classes, or values made of checked arguments: they refuse a state. Names that are not listed
are refused, or stand for `Foreign` objects, which keep their arguments and items.

The unpickler trusts sizes and lengths, and hashes keys of any depth. So `screen` follows the
instructions first, without building anything. Lib/pickletools.py of CPython describes them.
"""

import gc
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, ClassVar, Final, Never, Self, TypeAlias

from shardspec.errors import CheckpointError
from shardspec.text import printable, shown

MAX_PICKLE_BYTES: Final = 256 << 20
"""Some two million chunks of tensors; larger ones would fill the memory."""
_FREE_BYTES: Final = 48 << 20
_BYTES_A_BYTE: Final = 20
"""The memory that a pickle may take: a fixed amount, and an amount for each of its bytes."""
_COSTS: Final = {b"}\x8f": 232, b"]t\x85\x86\x87R\x81Q": 72}
"""Roughly the memory for what an instruction makes; others take some 10 times their bytes."""
_MAX_MARKS: Final = 10_000
_MAX_INT_BYTES: Final = 64
_MAX_KEY_PARTS: Final = 66
_MAX_ALIKE: Final = 10_000
"""Limit of tuples as keys, and of numbers of more than 64 bits: they could have equal hashes."""

_MAX_FOREIGN: Final = 1000
"""Limit of names in a pickle that are not on the list: each takes a kilobyte."""

_STARTS: Final = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")
_PUSHES: Final = frozenset(b"N\x88\x89)]}\x8fGKMJ")
"""Instructions that push a constant, a number or an empty container."""
_SIZES: Final = {b"Kqh\x8cC\x8a": 1, b"M": 2, b"JrjXB\x8b": 4, b"G\x8d\x95": 8}
_ARGUMENT_BYTES: Final = [
    sum(n for codes, n in _SIZES.items() if code in codes) for code in range(256)
]
"""Bytes of the number after each instruction; the number may be the length of what follows."""
_MAX_KNOWN: Final = 8
_MAX_KNOWN_BYTES: Final = 8 << 20


class RefusedError(Exception):
    """The problem of a pickle; `unpickle` adds its place."""


class PickleError(CheckpointError):
    """A pickle is damaged, too large, or has names or instructions that no checkpoint needs."""


def screen(data: bytes, fixed: bytearray | None = None) -> None:
    """Raise RefusedError for a pickle that takes too much time or memory, or has odd instructions.

    Sets bytes of `fixed` to 0 whose values make no difference.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise RefusedError(f"has {len(data)} bytes, past the limit of {MAX_PICKLE_BYTES}")
    if not data.startswith(_STARTS):
        raise RefusedError("is not a pickle of protocol 2 to 5; it is damaged")
    # An upper bound: bytes inside texts and numbers are counted too.
    cost = sum(each * data.count(code) for codes, each in _COSTS.items() for code in codes)
    if cost > _FREE_BYTES + _BYTES_A_BYTE * len(data):
        raise RefusedError(
            f"makes larger objects than {len(data)} bytes of a real one would; it is made to fill "
            "the memory"
        )
    try:
        _follow(data, fixed)
    except (IndexError, ValueError):
        problem = "ends too early, or takes away what is not there; it is damaged"
        raise RefusedError(problem) from None


def _follow(data: bytes, fixed: bytearray | None) -> None:  # noqa: C901  # a case an opcode
    """Follow the instructions; the stack has the number of parts of each value, as a tuple."""
    stack, memo = bytearray(), bytearray()
    marks: list[int] = []
    sizes, number, push, number_it = _ARGUMENT_BYTES, int.from_bytes, stack.append, memo.append
    at, alike = 2, 0
    # Most frequent instructions of metadata first.
    while True:
        code = data[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            number_it(stack[-1])
        elif code == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif code in _PUSHES:
            push(1)
            if fixed is not None:
                fixed[at : at + sizes[code]] = bytes(sizes[code])
            at += sizes[code]
        elif code in b"t\x85\x86\x87":  # TUPLE, TUPLE1 to TUPLE3
            first = marks.pop() if code == 0x74 else 0x84 - code
            parts = 1 + sum(stack[first:])
            del stack[first:]
            push(parts if parts < 255 else 255)
        elif code in b"R\x81":  # REDUCE, NEWOBJ: the result may be one of the arguments
            parts = stack.pop()
            stack[-1] = parts - 1 or 1
            if parts == 255:
                raise RefusedError("has large or nested tuples as arguments")
        elif code == 0x28:  # MARK
            marks.append(len(stack))
            if len(marks) > _MAX_MARKS:
                raise RefusedError(f"nests more than {_MAX_MARKS} deep")
        elif code in b"su\x90\x91":  # SETITEM, SETITEMS, ADDITEMS, FROZENSET
            first = len(stack) - 2 if code == 0x73 else marks.pop()
            keys = stack[first :: 2 if code in b"su" else 1]
            if keys and max(keys) > 1:
                alike += len(keys)
                if max(keys) > _MAX_KEY_PARTS or alike > _MAX_ALIKE:
                    raise RefusedError("has large or nested tuples, or many of them, as keys")
            stack[first:] = b"\1" if code == 0x91 else b""
        elif code in b"ab":  # APPEND, BUILD
            stack.pop()
        elif code == 0x65:  # APPENDS
            del stack[marks.pop() :]
        elif code == 0x93:  # STACK_GLOBAL
            stack[-2:] = b"\1"
        elif code == 0x51:  # BINPERSID
            stack[-1] = 1
        elif code == 0x63:  # GLOBAL: two lines
            at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
            push(1)
        elif code == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise RefusedError("does not end with one value; it is damaged")
            return
        elif sizes[code]:
            at += sizes[code]
            count = number(data[at - sizes[code] : at], "little")
            if code == 0x6A:  # LONG_BINGET
                push(memo[count])
            elif code in b"qr":  # BINPUT, LONG_BINPUT
                if count > len(memo):
                    # Writers number from 0 without gaps; the unpickler makes room up to the number.
                    raise RefusedError(f"numbers an object {count} after {len(memo)} of them")
                memo[count : count + 1] = (stack[-1],)
            elif code != 0x95:  # not FRAME, but texts, bytes and long numbers
                at += count
                if fixed is not None and code in b"X\x8c" and at < len(data):
                    fixed[at - count : at] = bytes(count)
                if code in b"\x8a\x8b" and count > 8:
                    alike += 1
                    if count > _MAX_INT_BYTES or alike > _MAX_ALIKE:
                        raise RefusedError(f"holds a whole number of {count} bytes; it is damaged")
                push(1)
        else:
            raise RefusedError(
                f"uses instruction {bytes((code,))!r} at byte {at - 1}, which no checkpoint needs; "
                "nothing of it was run"
            )


def alike_screen() -> Callable[[bytes], None]:
    """Return a faster `screen` for pickles that differ mostly in numbers and texts, as of ranks."""
    # Length, the bytes as a number, and 255 for each byte that must be the same.
    passed: list[tuple[int, int, int]] = []

    def screen_alike(data: bytes) -> None:
        value = int.from_bytes(data, "little")
        if any(len(data) == n and not (value ^ earlier) & mask for n, earlier, mask in passed):
            return
        fixed = bytearray(b"\xff") * len(data)
        screen(data, fixed)
        if len(passed) < _MAX_KNOWN and len(data) < _MAX_KNOWN_BYTES:
            passed.append((len(data), value, int.from_bytes(fixed, "little")))

    return screen_alike


class Global(type):
    """The inert class that a name in a pickle stands for."""

    name: str
    path: str  # module and name

    def __new__(  # noqa: D102  # described by its class
        cls, name: str, bases: tuple[type, ...], members: dict[str, object]
    ) -> "Global":
        members = {"__slots__": (), "name": name, "path": name, **members}
        return super().__new__(cls, name, bases, members)

    def __setattr__(cls, key: str, value: object) -> None:
        raise RefusedError(f"changes {cls.name}; nothing of it was run")

    def __setstate__(cls, state: object) -> None:
        raise RefusedError(f"gives a state to {cls.name}; it is damaged")

    def __repr__(cls) -> str:
        return cls.name


PickledNames: TypeAlias = Mapping[str, Global]
"""Full names, such as ``torch.float32``, to the classes that they stand for."""


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
        if self.state is not None:
            raise RefusedError(f"gives a state to <{self.name}>: it has a state already")
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def get(self, key: str) -> object:
        """Return a member of the state; None if it has none of that name."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class UnsupportedError(ValueError):
    """An intact value that cannot be read; the message has the remedy."""


class Foreign(Record):
    """Stands for an object of a class that is not on the list, and for results of calling it."""

    __slots__ = ("more",)

    more: list[object] | None
    """Its items, and further states."""

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
        """Keep an item, as of a list."""
        self.extend((item,))

    def extend(self, items: Iterable[object]) -> None:
        """Keep items, as of a list."""
        self.more = [] if self.more is None else self.more
        self.more.extend(items)

    add = append


class StateDict(dict[object, object]):
    """A dict that drops its attributes, such as the versions of a module's state dict."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


def record_class(path: str, name: str = "") -> Global:
    """Return a class of records, called by its path or by a shorter name."""
    return Global(name or path, (Record,), {"path": path})


def foreign_class(path: str) -> Global:
    """Return the class that a name that is not on the list stands for."""
    return Global(path, (Foreign,), {})


def made_by(name: str, function: Callable[..., object]) -> Global:
    """Return a class whose calls are those of a function, which may raise `ValueError`."""

    def make(_: type, *args: object) -> object:
        try:
            return function(*args)
        except UnsupportedError as error:
            raise RefusedError(f"holds what is not read: {error}") from None
        except (TypeError, UnicodeError):  # in Python's own words
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
    raise RefusedError(f"refers to {text}, outside of itself; it is damaged")


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        names: PickledNames,
        persistent: Callable[[object], object],
        *,
        foreign: bool,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._persistent = dict(names), persistent
        self._more_names = _MAX_FOREIGN if foreign else 0

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # as its parent
        path = f"{module}.{name}"
        if path not in self._names:
            if not self._more_names:
                raise RefusedError(
                    f"names {printable(f'{module}.{name:.200}'):.200}, which does not belong in a "
                    "checkpoint; nothing of it was run. If you trust its writer, save it again as "
                    "a state dict of tensors and plain values"
                )
            self._more_names -= 1
            self._names[path] = foreign_class(path)
        return self._names[path]

    def persistent_load(self, pid: object) -> object:
        try:
            return self._persistent(pid)
        except UnsupportedError as error:
            raise RefusedError(f"holds what is not read: {error}") from None
        except ValueError as error:
            raise RefusedError(f"refers to something outside of itself: {error}") from None


_DAMAGED: Final = (
    *(pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)


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
    what: str,
    persistent: Callable[[object], object] = _no_storage,
    screened: Callable[[bytes], None] = screen,
    *,
    foreign: bool = False,
) -> object:
    """Return the value of a pickle, in which the classes of `names` stand for those that it names.

    `path` and `what` (``"metadata"``) are for errors. `persistent` resolves references to objects
    outside the pickle. Names that are not listed stand for `Foreign` objects if `foreign` is set,
    and are refused otherwise. Raises PickleError if the pickle is refused or damaged.
    """
    try:
        screened(data)
        with no_collection():
            return _Unpickler(data, names, persistent, foreign=foreign).load()
    except RefusedError as error:
        problem = str(error)
    except UnicodeDecodeError:
        problem = "holds text that is not UTF-8; it is damaged"
    except _DAMAGED:  # in Python's own words
        problem = "is not as pickle writes it; it is damaged, restore it"
    raise PickleError(f"{path}: the {what} {problem}")
