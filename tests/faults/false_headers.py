"""Headers that say what is not so, or what no header may say."""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.faults.checks import refused
from tests.faults.harness import Case
from tests.faults.samples import own, plain

__all__ = ["false_headers"]

_Entries = dict[str, Any]
_Text = Callable[[random.Random, _Entries, bytes], bytes]
_HUGE: Final = 100_000_000
"""The limit of the format for a header."""


def _dump(entries: _Entries) -> bytes:
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()


def _tensors(entries: _Entries) -> list[str]:
    return [name for name in entries if name != "__metadata__"]


def _entry(rng: random.Random, entries: _Entries) -> dict[str, Any]:
    entry = entries[rng.choice(_tensors(entries))]
    assert isinstance(entry, dict)
    return entry


def _moved(rng: random.Random, entries: _Entries, by: int) -> None:
    """Move one tensor that has another before it, or all that follow a place."""
    ordered = sorted(_tensors(entries), key=lambda name: entries[name]["data_offsets"])
    first = rng.randrange(1, len(ordered))
    for name in ordered[first : rng.choice((first + 1, None))]:
        lo, hi = entries[name]["data_offsets"]
        entries[name]["data_offsets"] = [lo + by, hi + by]


def overlap(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Let tensors start inside the one before."""
    _moved(rng, entries, -rng.randrange(1, 8))
    return _dump(entries)


def hole(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Leave bytes out between tensors."""
    _moved(rng, entries, rng.randrange(1, 1 << rng.randrange(1, 62)))
    return _dump(entries)


def overflow(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Give offsets and sizes that only fit where numbers wrap around."""
    entry = _entry(rng, entries)
    lo, hi = entry["data_offsets"]
    turn = 1 << rng.choice((31, 32, 52, 53, 62, 63, 64, 65, 128))
    match rng.randrange(4):
        case 0:
            entry["data_offsets"] = [lo, hi + turn]
        case 1:
            entry["data_offsets"] = [lo + turn, hi + turn]
        case 2:
            entry["shape"] = [*entry["shape"], turn, rng.choice((3, turn))]
        case _:
            entry["data_offsets"] = [lo - turn, hi]
    return _dump(entries)


def wrong_dtype(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Give a dtype of another size, one that nobody knows, or none."""
    entry = _entry(rng, entries)
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1}
    others = [code for code, size in sizes.items() if size != sizes[entry["dtype"]]]
    unknown = ["F128", "f32", "", "I33", "float32", "F6_E2M3", " F32", "F32\0", "X" * 5000]
    entry["dtype"] = rng.choice((*others, *unknown, 8, None, True, [], ["F32"], {}, 1.5))
    return _dump(entries)


def wrong_shape(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Give a shape of another size, or what is not a shape."""
    entry = _entry(rng, entries)
    shape = entry["shape"]
    more: tuple[object, ...] = (rng.randrange(2, 99), 0, -1, 1.0, True, None, "1", [])
    bad: list[object] = [[*shape, size] for size in more]
    bad += [[shape], [1] * 65, "7", None, {}, 7, [1 << 64], [1e3]]
    entry["shape"] = rng.choice(bad)
    return _dump(entries)


def other_cut(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Give another dtype or shape of the same bytes: the info knows better."""
    entry = _entry(rng, entries)
    same = {"I32": "F32", "F32": "U32", "I64": "F64", "U8": "I8"}
    if rng.random() < 0.5:
        entry["dtype"] = same[entry["dtype"]]
    else:
        entry["shape"] = [*entry["shape"], 1] if rng.random() < 0.5 else [1, *entry["shape"]]
    return _dump(entries)


def other_names(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Rename or swap tensors, or change what the file says about itself."""
    names = _tensors(entries)
    a, b = rng.sample(names, 2)
    match rng.randrange(4):
        case 0:
            entries[a + rng.choice((" ", "x", "\0", "é"))] = entries.pop(a)
        case 1:
            key = rng.choice(list(entries["__metadata__"]))
            entries["__metadata__"][key] += rng.choice((" ", "0", "x"))
        case 2:
            del entries["__metadata__"][rng.choice(list(entries["__metadata__"]))]
        case _:
            entries[a], entries[b] = entries[b], entries[a]
    return _dump(entries)


def twice(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Repeat a key: of a tensor, of its fields, of the metadata."""
    text = _dump(entries).decode()
    name = rng.choice(_tensors(entries))
    key = rng.choice((json.dumps(name, ensure_ascii=False), '"dtype"', '"shape"', '"format"'))
    at = rng.choice([n for n in range(len(text)) if text.startswith(f"{key}:", n)])
    decoder = json.JSONDecoder()
    _, end = decoder.raw_decode(text, at + len(key) + 1)
    return (text[:at] + text[at:end] + "," + text[at:]).encode()


def no_utf8(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Put a byte where none of its kind can be."""
    text = bytearray(_dump(entries))
    text[rng.randrange(1, len(text))] = rng.choice((0x80, 0xBF, 0xC0, 0xF5, 0xFE, 0xFF))
    return bytes(text)


def deep(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Nest lists or objects in a place for something plain."""
    depth = rng.choice((3, 50, 900, 1100, 30_000, 200_000))
    lists = "[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth, "[" * depth
    at = rng.choice(("__metadata__", *_tensors(entries)))
    entries[at] = "DEEP" if rng.random() < 0.3 else entries[at] | {"shape": "DEEP"}
    return _dump(entries).replace(b'"DEEP"', rng.choice(lists).encode())


def no_json(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Break the text itself."""
    text = _dump(entries)
    at = rng.randrange(1, len(text))
    match rng.randrange(6):
        case 0:
            return b"\xef\xbb\xbf" + text
        case 1:
            return rng.choice((b" ", b"\n", b"[", b"", b"null", b'"')) + text[1:]
        case 2:
            return text[:at]
        case 3:
            return text + rng.choice((b"x", b"{}", b",", b"\0", b"]"))
        case 4:
            return text.replace(b"[", b"[" + rng.choice((b"NaN,", b"-Infinity,", b"1" * 9999)), 1)
        case _:
            return text[:-1] + b",}"


def other_fields(rng: random.Random, entries: _Entries, _data: bytes) -> bytes:
    """Leave a field out, add one, or put something else in the place of an entry."""
    name = rng.choice(_tensors(entries))
    entry = entries[name]
    match rng.randrange(4):
        case 0:
            del entry[rng.choice(list(entry))]
        case 1:
            entry[rng.choice(("offset", "Dtype", "", "strides"))] = 1
        case 2:
            entry["data_offsets"] = rng.choice(([], [1], [0, 1, 2], [3, 0], "01", None, [0.0, 1.0]))
        case _:
            entries[name] = rng.choice(([], None, 5, "F32", {}, True))
    return _dump(entries)


_KINDS: Final[dict[str, tuple[_Text, bool]]] = {
    "overlap": (overlap, True),
    "hole": (hole, True),
    "overflow": (overflow, True),
    "wrong dtype": (wrong_dtype, True),
    "wrong shape": (wrong_shape, True),
    "same size, other dtype or shape": (other_cut, False),
    "other names": (other_names, False),
    "duplicate key": (twice, True),
    "not UTF-8": (no_utf8, True),
    "deep nesting": (deep, True),
    "no JSON": (no_json, True),
    "other fields": (other_fields, True),
}
"""Kind to how it is made, and whether a plain file shows it without an info beside it."""


def _huge() -> Iterator[tuple[str, bytes, bytes, bytes]]:
    """Yield headers of 100 MB: a label, the start, what is repeated, and the end."""
    entry = b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    yield "blanks", b"{", b" ", b"}"
    yield "blanks at the end", b"{}", b" ", b""
    yield "zeros", b"{", b"\0", b""
    yield "lists in lists", b'{"w":', b"[", b""
    yield "lists in a list", b'{"w":{"dtype":"U8","data_offsets":[0,1],"shape":[', b"[],", b"[]]}}"
    yield "ones", b'{"w":{"dtype":"U8","data_offsets":[0,1],"shape":[', b"1,", b"1]}}"
    yield "a number", b'{"w":{"dtype":"U8","data_offsets":[0,1],"shape":[', b"1", b"]}}"
    yield "a name", b'{"', b"n", b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    yield "a dtype", b'{"w":{"shape":[1],"data_offsets":[0,1],"dtype":"', b"U", b'"}}'
    yield "one tensor again and again", b"{", entry % 7, b'"z":{}}'
    yield "empty objects", b"{", b'"a":{},', b'"b":{}}'
    yield "objects in objects", b"{", b'"a":{', b""
    yield "metadata", b'{"__metadata__":{"k":"', b"v", b'"}}'
    yield "metadata in pieces", b'{"__metadata__":{', b'"k":"v",', b'"k":"v"}}'
    yield "escapes", b'{"', b"\\u0000", b'":{}}'


def _written(path: Path, text: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little"))
    with path.open("ab") as file:
        file.write(text)
        file.write(data)


def _lie(path: Path, text: bytes, data: bytes, source: Path, place: Path) -> None:
    _written(path, text, data)
    refused(["merge", source, "-o", place / "out"], place, str(path))


def _huge_one(label: str, path: Path, place: Path) -> None:
    says = "65536" if label == "a name" else ""
    assert str(path) in (message := refused(["merge", path, "-o", place / "out"], place, says)), (
        message
    )


def _stated(path: Path, text: bytes, data: bytes, length: int, place: Path) -> None:
    _written(path, text, data, length)
    refused(["merge", path, "-o", place / "out"], place, str(path))


def false_headers(place: Path, whole: bool) -> Iterator[Case]:
    """Tell every kind of lie, of plain files and of files of a rank, with other numbers each."""
    rng = random.Random(4)
    single, sharded = plain(place / "single.safetensors"), own(place / "own")
    # The file of a rank that holds every tensor.
    ranked = sharded / "rank0.safetensors"
    for kind, (make, alone) in _KINDS.items():
        for number in range(160 if whole else 3):
            path, source = (single, single) if alone and number % 2 else (ranked, sharded)
            original = path.read_bytes()
            end = 8 + int.from_bytes(original[:8], "little")
            entries = json.loads(original[8:end])
            text = make(rng, entries, original[end:])
            yield Case(
                f"{kind} {number} in {path.name}",
                partial(_lie, path, text, original[end:], source, place),
            )
            path.write_bytes(original)
    original = single.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    for _ in range(80 if whole else 5):
        length = rng.choice((rng.randrange(end - 8), rng.randrange(1 << rng.randrange(8, 64))))
        if length != end - 8:
            yield Case(
                f"length {length} in single.safetensors",
                partial(_stated, single, original[8:end], original[end:], length, place),
            )
    single.unlink()
    huge = place / "huge.safetensors"
    for number, (label, start, again, last) in enumerate(_huge()):
        if whole or number in (4, 5):
            _fill(huge, start, again, last)
            yield Case(f"100 MB of {label}", partial(_huge_one, label, huge, place))
    huge.unlink(missing_ok=True)


def _fill(path: Path, start: bytes, again: bytes, last: bytes) -> None:
    """Write a header of the largest size, a part at a time, and one byte of data."""
    count, rest = divmod(_HUGE - len(start) - len(last), len(again))
    block = again * (1 + (1 << 20) // len(again))
    with path.open("wb") as file:
        file.write((_HUGE - rest).to_bytes(8, "little") + start)
        left = count * len(again)
        while left:
            left -= file.write(block[:left])
        file.write(last + b"\0")
