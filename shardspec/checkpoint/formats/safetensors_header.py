"""The safetensors format: a header is read with every check the specification asks for, or written.

A file is 8 bytes with the length of the header (little endian), the header (JSON), and the bytes
of the tensors. Source: README of https://github.com/huggingface/safetensors, section "Format".
"""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.strict_json import JSONStream, checked
from shardspec.dtypes import from_safetensors, item_bytes, packed, to_safetensors
from shardspec.errors import CheckpointError, DTypeError
from shardspec.text import shown

_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the format: no header needs more, and a damaged length must not fill the memory."""
MAX_DIMS: Final = 64
"""Most dims of a tensor, as in numpy and torch."""
_METADATA: Final = "__metadata__"
_FIELDS: Final = ("dtype", "shape", "data_offsets")
_ORDER: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
"""Order of the tensors in a file, as safetensors 0.8 writes it: wide dtypes first, so that every
tensor starts at a multiple of its item size; by name within a dtype."""


class HeaderEntry(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    """torch's name of the element type."""
    shape: tuple[int, ...]
    """In elements as torch counts them; a header counts numbers, of which F4 has two in a byte."""
    offset: int
    """Position of the first byte, from the start of the file."""
    num_bytes: int


class Header(NamedTuple):
    """What a file holds; the entries are in the order of their bytes."""

    entries: Sequence[HeaderEntry]
    metadata: Mapping[str, str]
    file_bytes: int
    """Size of the whole file."""


def read_header(file: SourceFile) -> Header:
    """Read and check the header of an open file."""
    path, file_bytes = file.path, file.num_bytes
    if file_bytes < 8:
        raise CheckpointError(
            f"{path}: has {file_bytes} bytes, too few for a safetensors file; it is truncated"
        )
    length = int.from_bytes(file.read(0, 8), "little")
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: states a header of {length} bytes, past the format's limit of "
            f"{_MAX_HEADER_BYTES}; it is damaged or no safetensors file"
        )
    if length > file_bytes - 8:
        raise CheckpointError(
            f"{path}: states a header of {length} bytes but has {file_bytes} in all; it is "
            "truncated"
        )
    if file.read(8, min(length, 1)) != b"{":
        raise CheckpointError(f"{path}: the header does not start with '{{'; it is damaged")
    metadata: dict[str, str] = {}
    entries = []
    # Many tensors have a dtype and a shape in common.
    known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    stream = JSONStream(lambda at, n: file.read(8 + at, n), length, path, "header")
    for name in stream.members():
        value = stream.value()
        if name == _METADATA:
            for key, text in checked(value, dict, path, _METADATA).items():
                metadata[key] = checked(text, str, path, f"{_METADATA}[{shown(key)}]")
            continue
        what = f"tensor {shown(name, 200)}"
        stated, first, size = _stated(value, what, path)
        if stated not in known:
            known[stated] = _meant(*stated, what, path)
        dtype, shape, due = known[stated]
        if size != due:
            raise CheckpointError(
                f"{path}: {what} of shape {list(shape)} and dtype {dtype} takes {due} bytes but "
                f"its data_offsets span {size}"
            )
        entries.append(HeaderEntry(name, dtype, shape, 8 + length + first, size))
    stream.end()
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    end = 8 + length
    for entry in entries:
        if entry.offset != end:
            raise CheckpointError(
                f"{path}: tensor {shown(entry.name, 200)} starts at byte {entry.offset} where "
                f"{end} is due; the data {'overlaps' if entry.offset < end else 'has a hole'}"
            )
        end += entry.num_bytes
    if end != file_bytes:
        problem = "it is truncated" if file_bytes < end else "there are bytes past its end"
        raise CheckpointError(
            f"{path}: has {file_bytes} bytes but its header describes {end}; {problem}"
        )
    return Header(tuple(entries), metadata, file_bytes)


def _stated(value: object, what: str, path: Path) -> tuple[tuple[str, tuple[int, ...]], int, int]:
    """Return what the header says of a tensor: its dtype and shape, its first byte and its size."""
    fields = checked(value, dict, path, what)
    if fields.keys() != set(_FIELDS):
        raise CheckpointError(
            f"{path}: {what} should have dtype, shape and data_offsets but has "
            f"{', '.join(map(shown, list(fields)[:8])) or 'nothing'}"
        )
    code = checked(fields["dtype"], str, path, f"dtype of {what}")
    shape = checked(fields["shape"], tuple, path, f"shape of {what}")
    span = checked(fields["data_offsets"], tuple, path, f"data_offsets of {what}")
    if len(span) != 2 or span[0] > span[1]:
        raise CheckpointError(f"{path}: data_offsets of {what} are no interval: {list(span)}")
    return (code, shape), span[0], span[1] - span[0]


def _meant(
    code: str, shape: tuple[int, ...], what: str, path: Path
) -> tuple[str, tuple[int, ...], int]:
    """Return torch's name of a dtype, a shape as torch counts it, and its bytes."""
    try:
        dtype = from_safetensors(code)
    except DTypeError as error:
        raise CheckpointError(f"{path}: {what}: {error}") from None
    if len(shape) > MAX_DIMS:
        raise CheckpointError(
            f"{path}: {what} has {len(shape)} dims; at most {MAX_DIMS} make sense"
        )
    numbers = packed(dtype)
    if numbers > 1:
        if not shape or shape[-1] % numbers:
            raise CheckpointError(
                f"{path}: {what} of shape {list(shape)} has {numbers} numbers to a byte, so its "
                f"last dim should be a multiple of {numbers}"
            )
        shape = (*shape[:-1], shape[-1] // numbers)
    return dtype, shape, prod(shape) * item_bytes(dtype)


class TensorSlot(NamedTuple):
    """A tensor to be written: what the header says about it."""

    name: str
    dtype: str
    """torch's name of the element type."""
    shape: tuple[int, ...]
    """In elements as torch counts them."""


def encode_header(slots: Iterable[TensorSlot], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """Return the first bytes of a file, up to its data, and where each tensor belongs.

    The bytes are those that safetensors itself writes for the same tensors.
    """
    ordered = sorted(slots, key=lambda slot: (_ORDER.index(to_safetensors(slot.dtype)), slot.name))
    # Entry by entry: one table of all would take five times the memory of its text.
    text = bytearray(b"{")
    ends = array("q", [0])
    try:
        if metadata:
            text += _member(_METADATA, dict(metadata))
        for slot in ordered:
            if slot.name == _METADATA:
                raise CheckpointError(
                    f"a tensor cannot be named {_METADATA!r}: the safetensors format keeps that "
                    "name for itself; rename the tensor"
                )
            ends.append(ends[-1] + prod(slot.shape) * item_bytes(slot.dtype))
            code, shape = to_safetensors(slot.dtype), _shape_of_numbers(slot)
            entry = dict(zip(_FIELDS, (code, shape, ends[-2:].tolist()), strict=True))
            text += (b"," if len(text) > 1 else b"") + _member(slot.name, entry)
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"a tensor name holds {error.object[error.start]!r}, which UTF-8 cannot express; "
            "rename the tensor"
        ) from None
    text += b"}"
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the names of {len(ordered)} tensors need a header of {len(text)} bytes, past the "
            f"safetensors format's limit of {_MAX_HEADER_BYTES}; write fewer tensors to a file"
        )
    start = 8 + len(text)
    entries = [
        HeaderEntry(*slot, start + first, end - first)
        for slot, (first, end) in zip(ordered, pairwise(ends), strict=True)
    ]
    head = b"".join((len(text).to_bytes(8, "little"), text))
    return head, Header(tuple(entries), dict(metadata), start + ends[-1])


def _shape_of_numbers(slot: TensorSlot) -> list[int]:
    """Return the shape that a header states."""
    numbers = packed(slot.dtype)
    if numbers > 1 and not slot.shape:
        raise CheckpointError(
            f"tensor {slot.name!r} is a scalar of {slot.dtype}, which the safetensors format "
            "cannot express: it counts the numbers along the last dim; give it the shape [1]"
        )
    return [*slot.shape[:-1], slot.shape[-1] * numbers] if slot.shape else []


def _member(name: str, value: object) -> bytes:
    """Return one member of a JSON object."""
    return json.dumps({name: value}, ensure_ascii=False, separators=(",", ":"))[1:-1].encode()
