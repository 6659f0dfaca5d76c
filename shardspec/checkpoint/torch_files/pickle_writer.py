"""Writing pickles that name things of torch, without torch.

Python's own writer imports what it names. This one writes the few instructions that a state dict
and torch's checkpoint metadata need. Source: Lib/pickletools.py of CPython.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from shardspec.errors import CheckpointError

__all__ = ["Call", "Made", "Name", "Outside", "Pairs", "check_text", "pickle_into", "pickled"]


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


def pickled(value: object) -> bytes:
    """Return a value as a pickle of protocol 2, as torch's files have it.

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
    >>> value = {"a": [1, -2.5, None], ("b", 2**70): Call(Name("builtins", "list"))}
    >>> pickle.loads(pickled(value))
    {'a': [1, -2.5, None], ('b', 1180591620717411303424): []}
    """
    out = BytesIO()
    pickle_into(value, out.write)
    return out.getvalue()


def pickle_into(value: object, write: Callable[[bytes], object]) -> None:
    """Write a value piece by piece, as `pickled` does."""
    write(b"\x80\x02")
    _put(value, write, {})
    write(b".")


def _put(value: object, out: Callable[[bytes], object], known: dict[object, int]) -> None:
    """Write a value; texts and names that are `known` are referred to by their numbers."""
    match value:
        case None:
            out(b"N")
        case bool():
            out(b"\x88" if value else b"\x89")
        case int():
            out(_int(value))
        case float():
            out(b"G" + struct.pack(">d", value))
        case str() | Name():
            number = known.get(value)
            if number is not None:
                out(_numbered(b"h", b"j", number))
                return
            if isinstance(value, Name):
                out(b"c" + _utf8(value.module) + b"\n" + _utf8(value.name) + b"\n")
            else:
                data = _utf8(value)
                out(b"X" + struct.pack("<I", len(data)) + data)
            out(_numbered(b"q", b"r", len(known)))
            known[value] = len(known)
        case bytes():
            # Python writes them so where the protocol has none of its own.
            text = value.decode("latin-1")
            _put(Call(Name("_codecs", "encode"), (text, "latin1")), out, known)
        case tuple() | list():
            # The mark of a list follows the list; short tuples need none.
            start, end = (b"](", b"e")
            if isinstance(value, tuple):
                start, end = _SHORT_TUPLES.get(len(value), (b"(", b"t"))
            out(start)
            for item in value:
                _put(item, out, known)
            out(end)
        case Mapping():
            _put(Pairs(value.items()), out, known)
        case Pairs(items):
            out(b"}(")
            for key, item in items:
                _put(key, out, known)
                _put(item, out, known)
            out(b"u")
        case Call(function, args):
            _put(function, out, known)
            _put(args, out, known)
            out(b"R")
        case Made(kind, state):
            _put(kind, out, known)
            out(b")\x81")
            if state is not None:
                _put(state, out, known)
                out(b"b")
        case Outside(key):
            _put(key, out, known)
            out(b"Q")
        case _:
            raise CheckpointError(
                f"{value!r:.60} is a {type(value).__name__}, which cannot be carried along"
            )


_SHORT_TUPLES: Final = {0: (b")", b""), 1: (b"", b"\x85"), 2: (b"", b"\x86"), 3: (b"", b"\x87")}


def _numbered(short: bytes, long: bytes, number: int) -> bytes:
    return short + bytes((number,)) if number < 256 else long + struct.pack("<I", number)


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        raise CheckpointError("a whole number of more than 255 bytes cannot be carried along")
    return b"\x8a" + bytes((len(data),)) + data


def check_text(text: str) -> None:
    """Raise `CheckpointError` if a text cannot be written."""
    _utf8(text)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{text!r:.60} holds {text[error.start]!r}, which UTF-8 cannot express; rename it"
        ) from None
