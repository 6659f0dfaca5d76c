"""One pass over a pickle before Python's own unpickler reads it: refuses what is made to hurt.

The unpickler runs nothing that a list does not name, but it believes lengths and numbers. So the
instructions are followed here without making anything: which of them there are, how deep they nest,
about how much memory their values take, and how many parts the keys of dicts have, which are hashed
one by one each time. Source: Lib/pickletools.py of CPython, which describes every instruction.
"""

import re
import struct
from collections.abc import Iterator
from functools import cache
from pickletools import genops
from typing import Final

__all__ = ["MOST_PICKLE_BYTES", "AlikeScreen", "RefusedError", "screen"]

MOST_PICKLE_BYTES: Final = 256 << 20
"""Of some two million chunks of tensors; more would fill the memory."""
_FREE_BYTES: Final = 48 << 20
_BYTES_A_BYTE: Final = 20
"""What a pickle may take of memory for each of its bytes, beyond what is free."""
_MOST_KNOWN: Final = 8
_MOST_KNOWN_BYTES: Final = 8 << 20
_MOST_MARKS: Final = 10_000
_MOST_INT_BYTES: Final = 64
_MOST_ALIKE: Final = 10_000
"""Tuples as keys, and numbers of more than 64 bits: all may be chosen to have one hash."""
_MOST_KEY_PARTS: Final = 66
_FULL: Final = 255
"""Parts of a tuple that has at least as many."""
_MOST_NAME_BYTES: Final = 512
_NUMBER: Final = struct.Struct("<L").unpack_from
_NEW: Final = b")\x81"
"""What makes an object without arguments, of a class that stands before."""
_TRUNCATED: Final = "ends too early; it is truncated"

_WIDTHS: Final = [0] * 256
"""Bytes of the instructions that push a value and are always as long; 0 for others."""
for _codes, _width in ((b"N\x88\x89)]}\x8f", 1), (b"K", 2), (b"M", 3), (b"J", 5), (b"G", 9)):
    for _code in _codes:
        _WIDTHS[_code] = _width
_FREE: Final = {"K": 1, "M": 1, "J": 1, "X": 5, "\x8c": 2}
"""Bytes of instructions before what makes no difference to other ones."""
_COUNTED: Final = {0x8C: 1, ord("X"): 4, 0x8D: 8, ord("C"): 1, ord("B"): 4, 0x8A: 1, 0x8B: 4}
"""Bytes of the length that stands before a text or number."""
_COSTS: Final = {b"}\x8f": 232, b"]t\x85\x86\x87R\x81Q": 72}
"""About what the values of instructions take of memory; those of others take some 10 bytes for each
of theirs."""


class RefusedError(Exception):
    """What is wrong with a pickle; `unpickle` says where."""


def screen(data: bytes) -> None:
    """Refuse a pickle that takes much time or memory, or uses what no checkpoint needs.

    Raises `IndexError` if it ends too early, or takes away what is not there.
    """
    if len(data) > MOST_PICKLE_BYTES:
        raise RefusedError(f"has {len(data)} bytes, past the limit of {MOST_PICKLE_BYTES}")
    if data[:1] != b"\x80":
        raise RefusedError("is no pickle of protocol 2 or later; it is damaged")
    if not 2 <= data[1] <= 5:
        raise RefusedError("has a protocol other than 2 to 5; it is damaged")
    # What stands inside of texts and numbers is counted too.
    cost = sum(each * data.count(code) for codes, each in _COSTS.items() for code in codes)
    if cost > _FREE_BYTES + _BYTES_A_BYTE * len(data):
        raise RefusedError(
            f"makes larger objects than {len(data)} bytes of a real one would; it is made to fill "
            "the memory"
        )
    try:
        # Protocols from 4 on have what runs are known by.
        if data[1] < 4 or not _follow(data, in_runs=True):
            _follow(data, in_runs=False)
    except struct.error:
        raise RefusedError(_TRUNCATED) from None


def _follow(data: bytes, *, in_runs: bool) -> bool:
    """Follow the instructions, by the number of parts that every value has if it is a tuple.

    Runs of small objects, of which metadata lists very many, are passed over at once. What they
    hold is only known to have few parts if no tuple has many: returns False where one does.
    """
    runs = _runs().match if in_runs else None
    widths = _WIDTHS
    stack, memo = bytearray(), bytearray()
    marks: list[int] = []
    push, number_it, number = stack.append, memo.append, _NUMBER
    at = 2
    alike = 0
    run = None
    while True:
        if run is not None:
            end = run.end()
            stack += b"\1" * data.count(b")\x81\x94", at, end)
            memo += bytes((_MOST_KEY_PARTS,)) * data.count(b"\x94", at, end)
            at, run = end, None
        code = data[at]
        width = widths[code]
        if width:
            push(1)
            at += width
        elif code == 0x72 or code == 0x71:  # LONG_BINPUT, BINPUT
            if code == 0x72:
                (place,) = number(data, at + 1)
                at += 5
            else:
                place = data[at + 1]
                at += 2
            if runs and stack[-1] > _MOST_KEY_PARTS:
                return False
            if place == len(memo):
                number_it(stack[-1])
            elif place < len(memo):
                memo[place] = stack[-1]
            else:
                # Writers number from 0 without gaps; the unpickler makes room up to the number.
                raise RefusedError(f"numbers an object {place} after {len(memo)} of them")
        elif code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
            width = 2 if code == 0x68 else 5
            run = runs(data, at) if runs and data[at + width : at + width + 2] == _NEW else None
            if run is None:
                push(memo[data[at + 1] if code == 0x68 else number(data, at + 1)[0]])
                at += width
        elif code == 0x94:  # MEMOIZE
            if runs and stack[-1] > _MOST_KEY_PARTS:
                return False
            number_it(stack[-1])
            at += 1
        elif 0x85 <= code <= 0x87 or code == 0x74:  # TUPLE1 to TUPLE3, TUPLE
            first = marks.pop() if code == 0x74 else len(stack) - (code - 0x84)
            parts = min(1 + sum(stack[first:]), _FULL)
            del stack[max(first, 0) :]
            push(parts)
            at += 1
        elif code == 0x28:  # MARK
            marks.append(len(stack))
            if len(marks) > _MOST_MARKS:
                raise RefusedError(f"nests more than {_MOST_MARKS} deep")
            at += 1
        elif code == 0x52 or code == 0x81:  # REDUCE, NEWOBJ: perhaps one of the arguments
            parts = stack.pop()
            stack[-1] = max(parts - 1, 1)
            at += 1
        elif code == 0x73 or code == 0x75 or code == 0x90 or code == 0x91:
            # SETITEM, SETITEMS, ADDITEMS, FROZENSET
            first = len(stack) - 2 if code == 0x73 else marks.pop()
            keys = stack[first :: 1 if code > 0x75 else 2]
            if keys and max(keys) > 1:
                alike += len(keys)
                if max(keys) > _MOST_KEY_PARTS or alike > _MOST_ALIKE:
                    if runs:
                        return False
                    raise RefusedError("has large or nested tuples, or many of them, as keys")
            del stack[first:]
            if code == 0x91:
                push(1)
            at += 1
        elif code == 0x61 or code == 0x62:  # APPEND, BUILD
            stack.pop()
            at += 1
        elif code == 0x65:  # APPENDS
            del stack[marks.pop() :]
            at += 1
        elif code in _COUNTED:
            width = _COUNTED[code]
            size = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            at += 1 + width + size
            if at >= len(data):
                raise RefusedError(_TRUNCATED)
            if code in b"\x8a\x8b" and size > 8:
                alike += 1
                if size > _MOST_INT_BYTES or alike > _MOST_ALIKE:
                    raise RefusedError(f"holds a whole number of {size} bytes; it is damaged")
            push(1)
        elif code == 0x63:  # GLOBAL
            for _ in range(2):
                end = data.find(b"\n", at + 1, at + 1 + _MOST_NAME_BYTES)
                if end < 0:
                    raise RefusedError("has a name without an end; it is damaged")
                at = end
            push(1)
            at += 1
        elif code == 0x93:  # STACK_GLOBAL
            stack[-2] = 1
            stack.pop()
            at += 1
        elif code == 0x51:  # BINPERSID
            stack[-1] = 1
            at += 1
        elif code == 0x95:  # FRAME
            at += 9
            if int.from_bytes(data[at - 8 : at], "little") > len(data) - at:
                raise RefusedError(_TRUNCATED)
        elif code == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise RefusedError("does not end with one value; it is damaged")
            return True
        else:
            raise RefusedError(
                f"uses instruction {bytes((code,))!r} at byte {at}, which no checkpoint needs; "
                "nothing of it was run"
            )


class AlikeScreen:
    """Screens pickles of which many are alike but for some numbers, as those of ranks are."""

    def __init__(self) -> None:
        self._known: list[tuple[bytes, bytearray]] = []
        """Pickles that passed, and where a byte may be any other one."""

    def __call__(self, data: bytes) -> None:
        """Refuse a pickle, as `screen` does."""
        for known, free in self._known:
            if len(known) == len(data) and all(free[at] for at in _differences(known, data)):
                return
        screen(data)
        if len(self._known) < _MOST_KNOWN and len(data) < _MOST_KNOWN_BYTES:
            free, last, start = bytearray(len(data)), "", 0
            for code, _, found in genops(data):
                at = found or 0
                if last in _FREE:
                    free[start + _FREE[last] : at] = b"\1" * (at - start - _FREE[last])
                last, start = code.code, at
            self._known.append((data, free))


def _differences(one: bytes, other: bytes) -> Iterator[int]:
    """Return where two pickles of one length differ."""
    differs = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    found = re.finditer(rb"[^\0]", differs.to_bytes(len(one), "little"), re.DOTALL)
    return (match.start() for match in found)


@cache
def _runs() -> re.Pattern[bytes]:
    """Return what runs of objects of few plain members look like, no byte 0x94 within a member.

    So each of these bytes is a MEMOIZE.
    """
    get = rb"(?:h[^\x94]|j[^\x94]{4})"
    number = rb"(?:K[^\x94]|M[^\x94]{2}|J[^\x94]{4})"
    sizes = rb"(?:\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)\x94)" % ((number,) * 4)
    wide = b"|".join(rb"\x8a%b[^\x94]{%d}" % (re.escape(bytes((n,))), n) for n in range(1, 9))
    text = b"|".join(rb"%b[^\x94]{%d}" % (re.escape(bytes((n,))), n) for n in range(128))
    item = rb"%b(?:%b\x85\x94R\x94)?|%b|%b|\x8c(?:%b)\x94|N" % (get, sizes, number, wide, text)
    return re.compile(rb"(?:%b\)\x81\x94}\x94\((?:%b){2,16}ub){1,1000}" % (get, item), re.DOTALL)
