"""Arguments read from text: meshes, shapes, ids, numbers, sizes; a `ValueError` if it is none."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from shardspec.comm.presets import link_preset
from shardspec.dtypes import dtype_name
from shardspec.text import shown

MeshShape: TypeAlias = tuple[tuple[int, ...], tuple[str, ...] | None]
"""Devices along each axis, and the names of the axes where they have any."""

MAX_DEVICES: Final = 2**20
"""A larger mesh is taken for a slip of the hand; its ids alone would fill the memory."""
_MAX_SIZE: Final = 2**63 - 1
_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}


def parse_mesh(text: str) -> MeshShape:
    """Read a mesh: sizes as in ``2x4``, or named axes as in ``dp=2,tp=4``."""
    names: tuple[str, ...] | None = None
    sizes = text.lower().split("x")
    if "=" in text:
        pairs = [part.partition("=") for part in text.split(",")]
        names = tuple(name.strip() for name, _, _ in pairs)
        sizes = [size for _, _, size in pairs]
    remedy = "give sizes as in 2x4, or named axes as in dp=2,tp=4"
    shape = _whole_numbers(sizes, "mesh", text, remedy)
    if math.prod(shape) > MAX_DEVICES:
        raise ValueError(f"mesh {shown(text)} has more than {MAX_DEVICES:,} devices")
    return shape, names


def parse_shape(text: str) -> tuple[int, ...]:
    """Read a tensor's shape as in ``4096x1024``; an empty text is a scalar."""
    if not text.strip():
        return ()
    remedy = 'give sizes as in 4096x4096, or "" for a scalar'
    shape = _whole_numbers(text.lower().split("x"), "shape", text, remedy)
    if math.prod(size for size in shape if size) > _MAX_SIZE:
        raise ValueError(f"shape {shown(text)} has more elements than a tensor can have, 2^63 - 1")
    return shape


def parse_ids(text: str) -> tuple[int, ...]:
    """Read device ids, separated by commas."""
    return _whole_numbers(text.split(","), "ids", text, "give them as in 3,1,0,2")


def parse_index(text: str) -> tuple[int, ...]:
    """Read positions in a tensor, separated by commas."""
    remedy = "give one position for each of the first dims, as in 17 or 3,0"
    return _whole_numbers(text.split(","), "index", text, remedy)


def parse_numbers(text: str) -> tuple[float, ...]:
    """Read finite numbers from 0, separated by commas."""
    numbers = []
    for part in map(str.strip, text.split(",")):
        try:
            number = float(part)
        except ValueError:
            raise ValueError(f"{shown(part)} is no number; give them as in 1e-5,3e-6") from None
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{shown(part)} must be finite and not negative")
        numbers.append(number)
    return tuple(numbers)


def parse_links(text: str) -> tuple[str, ...]:
    """Read names of link presets, separated by commas; `MeshError` if one is not known."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        link_preset(name)
    return names


def parse_memory(text: str) -> float:
    """Read a rate above 0 in GB/s; 0.0 for ``preset``, infinity for ``none``."""
    if text in ("preset", "none"):
        return 0.0 if text == "preset" else math.inf
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"{shown(text)}: give a rate above 0 in GB/s, 'preset' or 'none'")
    return rate


def parse_bytes(text: str) -> int:
    """Read a size in bytes, with a unit of 1,000 or of 1,024 if need be: ``64MiB``, ``1.5 kB``."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(
            f"{shown(text)} is no size; give bytes as in 1000000, or as in 64MiB or 1.5GB"
        )
    return math.floor(float(found[1]) * _UNITS[found[2].lower()])


def _whole_numbers(parts: list[str], what: str, text: str, remedy: str) -> tuple[int, ...]:
    numbers = []
    for digits in map(str.strip, parts):
        # int() also takes '1_000' and digits of other scripts, and refuses thousands of digits.
        if not (digits.isascii() and digits.isdecimal()):
            raise ValueError(f"{what} {shown(text)}: {shown(digits)} is no whole number; {remedy}")
        if len(digits) > len(str(_MAX_SIZE)) or int(digits) > _MAX_SIZE:
            raise ValueError(
                f"{what} {shown(text)}: {digits[:24]} is too large, the limit is 2^63 - 1"
            )
        numbers.append(int(digits))
    return tuple(numbers)


class Kind(NamedTuple):
    """What an argument is."""

    name: str
    """As help calls it."""
    read: Callable[[Any], object]
    """Reads its text; a `ValueError` says what is wrong."""
    completed: bool = False
    """Whether shells may complete it to the name of a file."""


BYTES: Final = Kind("SIZE", parse_bytes)
DTYPE: Final = Kind("NAME", dtype_name)
FILE: Final = Kind("FILE", Path)
IDS: Final = Kind("IDS", parse_ids)
MESH: Final = Kind("SHAPE", parse_mesh)
PRESETS: Final = Kind("PRESETS", parse_links)
SIZES: Final = Kind("SIZES", parse_shape)
