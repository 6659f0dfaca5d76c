"""Writing pickles that name things of torch, without torch.

Python's own writer imports what it names. This one writes the few instructions that a state dict
and torch's checkpoint metadata need. Source: Lib/pickletools.py of CPython.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shardspec.errors import CheckpointError

__all__ = ["Call", "Made", "Name", "Outside", "Pairs", "pickled"]


@dataclass(frozen=True, slots=True)
class Name:
    """Something that is found by its module and name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a call of something gives."""

    function: Name
    args: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """An object of a class, made without a call, and its state."""

    kind: Name
    state: object = None


@dataclass(frozen=True, slots=True)
class Outside:
    """A reference to something outside of the pickle, such as a storage."""

    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict whose keys Python cannot hash here, or of which no more than an item is held."""

    items: Iterable[tuple[object, object]]


def pickled(value: object, *, numbered: bool = False) -> bytes:
    """Return a value as a pickle.

    Parameters
    ----------
    value
        None, numbers, text, bytes, and tuples, lists and dicts of such; and the values above.
    numbered
        Write protocol 4 and number all that Python's pickler does, as readers of many like things
        may expect; otherwise protocol 2, as torch's files have it.

    Raises
    ------
    CheckpointError
        If it is something else.

    Examples
    --------
    >>> import pickle
    >>> value = {"a": [1, -2.5, None], ("b", 2**70): Call(Name("builtins", "list"))}
    >>> pickle.loads(pickled(value))
    {'a': [1, -2.5, None], ('b', 1180591620717411303424): []}
    >>> pickle.loads(pickled(value, numbered=True)) == pickle.loads(pickled(value))
    True
    """
    writer = _NumberingWriter() if numbered else _Writer()
    writer.put(value)
    protocol = 4 if numbered else 2
    return b"\x80" + bytes((protocol,)) + bytes(writer.parts) + b"."


class _Writer:
    """Writes protocol 2; numbers texts and names only."""

    def __init__(self) -> None:
        self.parts = bytearray()
        self._known: dict[object, int] = {}
        self._numbers = 0

    def put(self, value: object) -> None:
        """Write a value."""
        parts = self.parts
        match value:
            case None:
                parts.extend(b"N")
            case bool():
                parts.extend(b"\x88" if value else b"\x89")
            case int():
                parts.extend(self.int_(value))
            case float():
                parts.extend(b"G" + struct.pack(">d", value))
            case str() | Name():
                self._once(value)
            case bytes():
                self.bytes_(value)
            case tuple():
                self.tuple_(value)
            case list():
                parts.extend(b"]")
                self.made()
                parts.extend(b"(")
                for item in value:
                    self.put(item)
                parts.extend(b"e")
            case Mapping():
                self.put(Pairs(value.items()))
            case Pairs(items):
                parts.extend(b"}")
                self.made()
                parts.extend(b"(")
                for key, item in items:
                    self.put(key)
                    self.put(item)
                parts.extend(b"u")
            case Call(function, args):
                self.put(function)
                self.put(args)
                parts.extend(b"R")
                self.made()
            case Made(kind, state):
                self.put(kind)
                parts.extend(b")\x81")
                self.made()
                if state is not None:
                    self.put(state)
                    parts.extend(b"b")
            case Outside(key):
                self.put(key)
                parts.extend(b"Q")
            case _:
                raise CheckpointError(
                    f"{value!r:.60} is a {type(value).__name__}, which cannot be carried along"
                )

    def _once(self, value: "str | Name") -> None:
        """Write a text or a name once, and refer to it afterwards."""
        place = self._known.get(value)
        if place is not None:
            self.parts.extend(self.taken_up(place))
            return
        if isinstance(value, Name):
            self.name(value)
        else:
            self.parts.extend(self.text(_utf8(value)))
        self._known[value] = self._numbers
        self.parts.extend(self.number(self._numbers))
        self._numbers += 1

    def made(self) -> None:
        """Take note that something was made, which is numbered if all is to be."""

    def tuple_(self, value: tuple[object, ...]) -> None:
        """Write a tuple."""
        self.parts.extend(b"(")
        for item in value:
            self.put(item)
        self.parts.extend(b"t")

    def bytes_(self, value: bytes) -> None:
        """Write bytes, of which protocol 2 has none of its own, as Python does there."""
        self.put(Call(Name("_codecs", "encode"), (value.decode("latin-1"), "latin1")))

    def name(self, value: Name) -> None:
        """Write a name."""
        self.parts.extend(b"c" + _utf8(value.module) + b"\n" + _utf8(value.name) + b"\n")

    @staticmethod
    def text(data: bytes) -> bytes:
        """Return what writes a text."""
        return b"X" + _sized(data)

    @staticmethod
    def int_(value: int) -> bytes:
        """Return what writes a whole number."""
        return _int(value)

    @staticmethod
    def number(place: int) -> bytes:
        """Return what numbers the value that was written last."""
        return b"r" + struct.pack("<I", place)

    @staticmethod
    def taken_up(place: int) -> bytes:
        """Return what refers to a number."""
        return b"j" + struct.pack("<I", place)


class _NumberingWriter(_Writer):
    """Writes protocol 4; numbers all that Python's pickler does."""

    def made(self) -> None:
        """Give it a number."""
        self.parts.extend(b"\x94")
        self._numbers += 1

    def tuple_(self, value: tuple[object, ...]) -> None:
        """Write a tuple."""
        if not value:
            self.parts.extend(b")")
            return
        short = _SHORT_TUPLES.get(len(value))
        if short is None:
            super().tuple_(value)
        else:
            for item in value:
                self.put(item)
            self.parts.extend(short)
        self.made()

    def bytes_(self, value: bytes) -> None:
        """Write bytes."""
        self.parts.extend(b"B" + _sized(value))
        self.made()

    def name(self, value: Name) -> None:
        """Write a name."""
        self.put(value.module)
        self.put(value.name)
        self.parts.extend(b"\x93")

    @staticmethod
    def text(data: bytes) -> bytes:
        """Return what writes a text."""
        return b"\x8c" + bytes((len(data),)) + data if len(data) < 256 else b"X" + _sized(data)

    @staticmethod
    def int_(value: int) -> bytes:
        """Return what writes a whole number."""
        if 0 <= value < 1 << 8:
            return b"K" + bytes((value,))
        return b"M" + struct.pack("<H", value) if 0 <= value < 1 << 16 else _int(value)

    @staticmethod
    def number(_: int) -> bytes:
        """Return what numbers the value that was written last."""
        return b"\x94"

    @staticmethod
    def taken_up(place: int) -> bytes:
        """Return what refers to a number."""
        return b"h" + bytes((place,)) if place < 256 else b"j" + struct.pack("<I", place)


_SHORT_TUPLES: Final = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def _int(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        raise CheckpointError("a whole number of more than 255 bytes cannot be carried along")
    return b"\x8a" + bytes((len(data),)) + data


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{text!r:.60} holds {text[error.start]!r}, which UTF-8 cannot express; rename it"
        ) from None


def _sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data
