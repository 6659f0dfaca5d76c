"""Writing pickles that name things of torch, without torch.

Python's own writer imports what it names. This one writes the few instructions that a state dict
and torch's checkpoint metadata need. Source: Lib/pickletools.py of CPython.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

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
    """A dict whose keys Python cannot hash here."""

    items: tuple[tuple[object, object], ...]


def pickled(value: object) -> bytes:
    """Return a value as a pickle of protocol 2.

    Parameters
    ----------
    value
        None, numbers, text, bytes, and tuples, lists and dicts of such; and the values above.

    Raises
    ------
    CheckpointError
        If it is something else.

    Examples
    --------
    >>> import pickle
    >>> pickle.loads(pickled({"a": [1, -2.5, None], ("b", 2**70): Call(Name("builtins", "list"))}))
    {'a': [1, -2.5, None], ('b', 1180591620717411303424): []}
    """
    writer = _Writer()
    writer.put(value)
    return b"\x80\x02" + b"".join(writer.parts) + b"."


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[object, int] = {}

    def put(self, value: object) -> None:
        """Write a value."""
        parts = self.parts
        match value:
            case None:
                parts.append(b"N")
            case bool():
                parts.append(b"\x88" if value else b"\x89")
            case int():
                parts.append(_int(value))
            case float():
                parts.append(b"G" + struct.pack(">d", value))
            case str():
                self._known(value, b"X" + _sized(_utf8(value)))
            case bytes():
                # Protocol 2 has no bytes of its own; this is what Python writes for them.
                self.put(Call(Name("_codecs", "encode"), (value.decode("latin-1"), "latin1")))
            case tuple():
                parts.append(b"(")
                for item in value:
                    self.put(item)
                parts.append(b"t")
            case list():
                parts.append(b"](")
                for item in value:
                    self.put(item)
                parts.append(b"e")
            case Mapping():
                self.put(Pairs(tuple(value.items())))
            case Pairs(items):
                parts.append(b"}(")
                for key, item in items:
                    self.put(key)
                    self.put(item)
                parts.append(b"u")
            case Name(module, name):
                self._known(value, b"c" + _utf8(module) + b"\n" + _utf8(name) + b"\n")
            case Call(function, args):
                self.put(function)
                self.put(args)
                parts.append(b"R")
            case Made(kind, state):
                self.put(kind)
                parts.append(b")\x81")
                if state is not None:
                    self.put(state)
                    parts.append(b"b")
            case Outside(key):
                self.put(key)
                parts.append(b"Q")
            case _:
                raise CheckpointError(
                    f"{value!r:.60} is a {type(value).__name__}, which cannot be carried along"
                )

    def _known(self, value: object, instructions: bytes) -> None:
        """Write a text or a name once, and refer to it afterwards."""
        place = self._memo.get(value)
        if place is not None:
            self.parts.append(b"j" + struct.pack("<I", place))
            return
        place = self._memo[value] = len(self._memo)
        self.parts.append(instructions + b"r" + struct.pack("<I", place))


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
