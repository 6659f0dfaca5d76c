"""Computes digests of tensors that do not depend on sharding: digests of boxes add up.

`docs/digest.md` defines ``shardspec-digest-1``. In short: the bytes of a tensor are read as 32-bit
numbers. Each number is multiplied by a key of its row and a key of its position in the row, and the
products are added modulo 2^64. Two such sums with different keys are the lanes. A third sum, the
cover, adds one key per element, so that gaps and overlaps show even in a tensor of zeros.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import (
    Box,
    box_shape,
    box_size,
    chunks,
    contains,
    row_major_boxes,
    slices_within,
)
from shardspec.dtypes import bits_type, dtype_name, from_safetensors, item_bytes, to_safetensors
from shardspec.errors import CheckpointError, DTypeError, LayoutError
from shardspec.text import counted, shown

DIGEST_FORMAT: Final = "shardspec-digest-1"
LANES: Final = 2
_ROW_BYTES: Final = 1024
"""Minimum bytes of a row; trailing dims are joined to reach it."""
_SEGMENT_BYTES: Final = 1 << 14
"""Maximum bytes of a segment; longer rows are cut."""
_STEP_BYTES: Final = 1 << 18
"""Bytes processed per step (fits the L2 cache)."""
_CHUNK_BYTES: Final = 1 << 22
"""Largest part of an array that is copied at once."""
_MASK: Final = 2**64 - 1
_VALUE: Final = re.compile(f"[0-9a-f]{{{16 * LANES}}}")
_COVER_VALUE: Final = re.compile("[0-9a-f]{16}")
_COVER_BLOCK: Final = 4096
"""Indices of a dim that share the key of a block."""
_TILE_BYTES: Final = 1 << 20
"""Bytes per step for non-contiguous arrays, which are copied first."""
_TILE_ROW_BYTES: Final = 2048
"""Length of a row of such a tile."""

_Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """The digest of a tensor, or of some boxes of it; digests of disjoint boxes add up.

    Examples
    --------
    >>> import numpy as np
    >>> whole = np.arange(12, dtype=np.int16).reshape(3, 4)
    >>> left = TensorDigest.of_box(whole[:, :1], ((0, 3), (0, 1)), (3, 4), "int16")
    >>> right = TensorDigest.of_box(whole[:, 1:], ((0, 3), (1, 4)), (3, 4), "int16")
    >>> left + right == TensorDigest.of_box(whole, ((0, 3), (0, 4)), (3, 4), "int16")
    True
    >>> left.complete, (left + right).complete, (left + right).value
    (False, True, 'adab8d53218bac322ee38adcd06730e6')
    """

    dtype: str
    """torch's name of the element type."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    sums: tuple[int, ...] = (0,) * (LANES + 1)
    """The two lanes and the cover."""
    seed: int = 0
    """Number that selects the keys."""

    @classmethod
    def of_box(
        cls,
        array: NDArray[np.generic],
        box: Box,
        shape: Iterable[int],
        dtype: object,
        seed: int = 0,
    ) -> "TensorDigest":
        """Return the digest of one box; `array` has its elements, or integers with the same bits.

        Raises LayoutError if the array has not the shape of the box, the width of the dtype and the
        byte order of this machine, or if the box is not inside the tensor.
        """
        name, sizes = dtype_name(dtype), tuple(shape)
        fits = len(box) == len(sizes) and contains(tuple((0, n) for n in sizes), box)
        same = array.shape == box_shape(box) and array.itemsize == item_bytes(name)
        if not fits or not same or not array.dtype.isnative:
            raise LayoutError(
                f"an array of {list(array.shape)} {array.dtype} is not box {list(box)} of a tensor "
                f"of {list(sizes)} {name}; give the elements of the box"
            )
        return cls(name, sizes, seed=seed)._with(array, box)

    @classmethod
    def of_value(
        cls,
        value: str,
        shape: tuple[int, ...],
        dtype: str,
        seed: int = 0,
        cover: str | None = None,
    ) -> "TensorDigest":
        """Return the digest that was saved as text; by default it covers all elements.

        Raises CheckpointError if value or cover is invalid.
        """
        if not _VALUE.fullmatch(value):
            raise CheckpointError(f"{shown(value)} is not a digest of {16 * LANES} hex digits")
        if cover is not None and not _COVER_VALUE.fullmatch(cover):
            raise CheckpointError(f"{shown(cover)} is not a cover of 16 hex digits")
        lanes = (int(value[at : at + 16], 16) for at in range(0, 16 * LANES, 16))
        every = _cover(tuple((0, n) for n in shape), seed)
        return cls(dtype, shape, (*lanes, every if cover is None else int(cover, 16)), seed)

    def with_bytes(
        self, data: "NDArray[np.uint8] | memoryview", box: Box, start: int = 0
    ) -> "TensorDigest":
        """Add the bytes of a box to this digest, from byte `start` of the row-major box on."""
        flat = np.frombuffer(data, bits_type(item_bytes(self.dtype)))
        digest, at, first = self, 0, start // flat.itemsize
        for part in row_major_boxes(box_shape(box), first, first + len(flat)):
            inside = tuple((lo + a, lo + b) for (lo, _), (a, b) in zip(box, part, strict=True))
            size = box_size(part)
            digest = digest._with(flat[at : at + size].reshape(box_shape(part)), inside)
            at += size
        return digest

    def _with(self, array: NDArray[np.generic], box: Box) -> "TensorDigest":
        """Return this digest with the elements of a box added."""
        if not box_size(box):  # its other dims may be huge
            return self
        lanes = _lanes(array.view(bits_type(array.itemsize)), box, self.shape, self.seed)
        return self._plus((*lanes.tolist(), _cover(box, self.seed)))

    def _plus(self, sums: Iterable[int]) -> "TensorDigest":
        added = tuple((a + b) & _MASK for a, b in zip(self.sums, sums, strict=True))
        return replace(self, sums=added)

    def __add__(self, other: "TensorDigest") -> "TensorDigest":
        if (self.dtype, self.shape, self.seed) != (other.dtype, other.shape, other.seed):
            raise LayoutError(
                f"digests of {self._kind()} and of {other._kind()} cannot be added; digest parts "
                "of one tensor with one seed"
            )
        return self._plus(other.sums)

    def _kind(self) -> str:
        return f"{list(self.shape)} {self.dtype}" + (f" with seed {self.seed}" if self.seed else "")

    @property
    def value(self) -> str:
        """The two lanes as 32 hexadecimal digits."""
        return "".join(f"{lane:016x}" for lane in self.sums[:LANES])

    @property
    def cover(self) -> str:
        """Sum of one key per element, as 16 hexadecimal digits."""
        return f"{self.sums[-1]:016x}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * item_bytes(self.dtype)

    @property
    def complete(self) -> bool:
        """True if every element was counted exactly once."""
        return self.sums[-1] == _cover(tuple((0, size) for size in self.shape), self.seed)

    def difference(self, other: "TensorDigest") -> str:
        """Return the difference from another digest in words; "" if they are equal."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return f"is {self._kind()} in one and {other._kind()} in the other"
        if self.value != other.value:
            return f"has digest {self.value} in one and {other.value} in the other"
        if self.sums != other.sums:
            return "has some elements in one only, or counts them twice; add up all parts first"
        return ""


class Digests(Mapping[str, TensorDigest]):
    """Digests by tensor name, of a checkpoint or state dict; digests of parts add up.

    Examples
    --------
    >>> import torch
    >>> from shardspec import digest
    >>> digests = digest({"w": torch.zeros(3), "b": torch.ones(2)})
    >>> digests["b"].value, digests.value
    ('10d1ab6ddb000000aee180e7bb000000', 'bf93d9ec995e50c27f86fcc2526dfa7f')
    >>> digests.differences(digest({"w": torch.zeros(3), "b": torch.ones(2)}))
    []
    >>> len(digests.differences(digest({"w": torch.zeros(3), "b": torch.zeros(2)})))
    1
    >>> digest({"w": torch.zeros(3)}) + digest({"b": torch.ones(2)}) == digests
    True
    """

    def __init__(self, tensors: Mapping[str, TensorDigest], seed: int = 0) -> None:
        for name, digest in tensors.items():
            if digest.seed != seed:
                raise LayoutError(
                    f"the digest of {name!r} has seed {digest.seed}, others have {seed}; use one"
                )
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        self.seed = seed

    def __getitem__(self, name: str) -> TensorDigest:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Digests({counted(len(self), 'tensor')}, value {self.value})"

    def __add__(self, other: "Digests") -> "Digests":
        """Add digests of other tensors, or of other boxes of the same tensors."""
        if self.seed != other.seed:
            raise CheckpointError(
                f"digests with seeds {self.seed} and {other.seed} cannot be added; use one seed"
            )
        total = {**self, **other}
        for name in [name for name in self if name in other]:  # a set has no fixed order
            first, second = self[name], other[name]
            if (first.complete and second.sums[-1]) or (second.complete and first.sums[-1]):
                raise CheckpointError(f"{shown(name)} is complete in both digests; add it once")
            try:
                total[name] = first + second
            except LayoutError as error:
                raise CheckpointError(f"cannot add digests of {shown(name)}: {error}") from None
        return Digests(total, self.seed)

    def require_complete(self) -> "Digests":
        """Return these digests, or raise CheckpointError if a tensor has gaps or overlaps."""
        for name, digest in self.items():
            if not digest.complete:
                raise CheckpointError(
                    f"the digested boxes of {shown(name)} leave gaps or overlap; add digests of "
                    "boxes that tile the tensor"
                )
        return self

    @property
    def value(self) -> str:
        """Hash of all names, dtypes, shapes and values, as 32 hexadecimal digits."""
        lines = hashlib.sha256()
        for name, digest in self.items():
            row = [name, to_safetensors(digest.dtype), list(digest.shape), digest.value]
            row += [] if digest.complete else [digest.cover]
            lines.update(f"{json.dumps(row, separators=(',', ':'))}\n".encode())
        return lines.hexdigest()[:32]

    def differences(self, other: "Digests") -> list[str]:
        """Return the differences from other digests, one line per tensor."""
        if self.seed != other.seed:
            raise CheckpointError(
                f"digests with seed {self.seed} and with seed {other.seed} cannot be compared; "
                "use one seed"
            )
        lines = []
        for name in sorted({*self, *other}):
            if name not in self or name not in other:
                side = "second" if name in other else "first"
                lines.append(f"tensor {shown(name)} is only in the {side}")
            elif problem := self[name].difference(other[name]):
                lines.append(f"tensor {shown(name)} {problem}")
        return lines

    def require_same(self, other: "Digests") -> None:
        """Raise CheckpointError, with the first differences, unless the others are equal."""
        first, *others = self.differences(other) or [""]
        more = f" (and {counted(len(others), 'other tensor')})" if others else ""
        if first:
            raise CheckpointError(first + more)

    def to_json(self) -> dict[str, object]:
        """Return the digests as a dict for a JSON file."""
        tensors = {}
        for name, digest in self.items():
            dtype = to_safetensors(digest.dtype)
            tensors[name] = {"dtype": dtype, "shape": list(digest.shape), "value": digest.value}
            tensors[name] |= {} if digest.complete else {"cover": digest.cover}
        return {"format": DIGEST_FORMAT, "seed": self.seed, "value": self.value, "tensors": tensors}

    @classmethod
    def from_json(cls, stored: object, where: str = "digests") -> "Digests":
        """Return the digests that `to_json` wrote; raises CheckpointError for another format.

        Errors name `where`, such as a file.
        """

        def wrong(problem: str) -> CheckpointError:
            return CheckpointError(f"{where}: {problem}; make it anew with 'shardspec digest'")

        if not isinstance(stored, dict) or stored.get("format") != DIGEST_FORMAT:
            other = stored.get("format") if isinstance(stored, dict) else stored
            raise wrong(f"has format {shown(other)}, but only {DIGEST_FORMAT!r} can be read")
        seed, entries = stored.get("seed"), stored.get("tensors")
        if type(seed) is not int or not 0 <= seed <= _MASK or not isinstance(entries, dict):
            raise wrong("has no seed from 0 to 2^64 - 1, or no tensors")
        tensors = {}
        for name, entry in entries.items():
            fields = entry if isinstance(entry, dict) else {}
            shape, value = fields.get("shape"), str(fields.get("value"))
            cover = None if "cover" not in fields else str(fields["cover"])
            sizes = isinstance(shape, list) and all(
                type(n) is int and 0 <= n < 2**63 for n in shape
            )
            if not (isinstance(shape, list) and sizes and prod(shape) < 2**63):
                raise wrong(f"{shown(name)} has no shape")
            try:
                dtype = from_safetensors(str(fields.get("dtype")))
                tensors[name] = TensorDigest.of_value(value, tuple(shape), dtype, seed, cover)
            except (DTypeError, CheckpointError) as error:
                raise wrong(f"the digest of {shown(name)} is invalid: {error}") from None
        digests = cls(tensors, seed)
        if stored.get("value") != digests.value:
            raise wrong(
                f"its value is {shown(stored.get('value'))}, but its tensors give {digests.value}"
            )
        return digests


# --- the sums


def _mixed(numbers: _Words) -> _Words:
    """Return pseudorandom numbers: the output of SplitMix64 for each state."""
    z = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_GAMMA: Final = 0x9E3779B97F4A7C15
# Streams of keys: for rows one per lane; for words in a row two per lane; for the cover two per
# dim.
_ROWS: Final = 0
_WORDS: Final = LANES
_COVER: Final = 3 * LANES


@lru_cache(64)
def _start(stream: int, seed: int) -> int:
    """Return the first state of SplitMix64 for one of several sequences of keys, the streams."""
    before = np.array([(seed + (stream + 1) * _GAMMA) & _MASK], np.uint64)
    return int(_mixed(before)[0])


def _keys(numbers: _Words, streams: Iterable[int], seed: int) -> _Words:
    """Return odd pseudorandom keys: element [s, i] is key `numbers[i]` of stream `streams[s]`."""
    starts = np.array([[(_start(stream, seed) + _GAMMA) & _MASK] for stream in streams], np.uint64)
    return _mixed(starts + numbers * np.uint64(_GAMMA)) | np.uint64(1)


@lru_cache(8)
def _word_keys(seed: int) -> _Words:
    """Return an array with a column of keys per word of a segment, and two rows per lane."""
    places = np.arange(_SEGMENT_BYTES // 8, dtype=np.uint64)
    return _keys(places, range(_WORDS, _COVER), seed)


def _joined_from(shape: tuple[int, ...], width: int) -> int:
    """Return the dim from which on the last dims make rows of at least 1024 bytes, else 0."""
    dim = len(shape) - 1
    while dim > 0 and prod(shape[dim:]) * width < _ROW_BYTES:
        dim -= 1
    return dim


def _outer(intervals: Box, sizes: Iterable[int]) -> _Words:
    """Return the row-major index of each element of box `intervals` in a tensor of `sizes`."""
    numbers: _Words = np.array([0], np.uint64)
    for (lo, hi), size in zip(intervals, sizes, strict=True):
        inner = np.arange(lo, hi, dtype=np.uint64)
        numbers = np.add.outer(numbers * np.uint64(size), inner).ravel()
    return numbers


def _lanes(array: NDArray[np.generic], box: Box, shape: tuple[int, ...], seed: int) -> _Words:
    """Return the two lanes (sums of number x key) of a box."""
    width, lanes = array.itemsize, np.zeros(LANES, np.uint64)
    adjacent = not box or array.strides[-1] == width or array.shape[-1] == 1
    (lo, hi) = box[-1] if box else (0, 1)
    columns = (hi - lo if adjacent else _TILE_ROW_BYTES // width) or 1
    limit = (_CHUNK_BYTES if adjacent else _TILE_BYTES) // width
    strips = ((*box[:-1], (at, min(at + columns, hi)))[: len(box)] for at in range(lo, hi, columns))
    for tile in chain.from_iterable(chunks(strip, limit) for strip in strips):
        part = array[slices_within(tile, box)]
        if not adjacent:
            row_major = np.empty(part.shape, part.dtype)
            for piece in chunks(tile, _STEP_BYTES // width):
                inside = slices_within(piece, tile)
                # A copy in the order of memory comes first, to be in the cache.
                row_major[inside] = part[inside].copy("K")
            part = row_major
        lanes += _tile_lanes(part, tile, shape, seed)
    return lanes


def _tile_lanes(array: NDArray[np.generic], box: Box, shape: tuple[int, ...], seed: int) -> _Words:
    """Return the two lanes of a nonempty box whose elements are contiguous."""
    if not shape:
        array, box, shape = array.reshape(1), ((0, 1),), (1,)
    dim = _joined_from(shape, array.itemsize)
    rows, inner = _outer(box[:dim], shape[:dim]), shape[dim + 1 :]
    (lo, hi), size = box[dim], prod(inner)
    if box_shape(box[dim + 1 :]) != inner:
        # Zeros between the elements of a row add nothing.
        filled = np.zeros((*array.shape[: dim + 1], *inner), array.dtype)
        inside = slices_within(box[dim + 1 :], tuple((0, size) for size in inner))
        filled[(slice(None),) * (dim + 1) + inside] = array
        array = filled
    first, last = lo * size, hi * size
    part = array.reshape(len(rows), last - first)
    if part.strides[-1] != array.itemsize:  # a column, as one row
        part = np.ascontiguousarray(part)
    per_segment = _SEGMENT_BYTES // array.itemsize
    segments = -(-prod(shape[dim:]) // per_segment)
    lanes = np.zeros(LANES, np.uint64)
    boundary = min(last, -(-first // per_segment) * per_segment)
    for a, b in pairwise((first, boundary, max(boundary, last // per_segment * per_segment), last)):
        if a < b:
            num_segments = max(1, (b - a) // per_segment)
            block = part[:, a - first : b - first].reshape(-1, (b - a) // num_segments)
            places = np.arange(a // per_segment, a // per_segment + num_segments, dtype=np.uint64)
            numbers = (rows[:, None] * np.uint64(segments) + places).ravel()
            lanes += _block_lanes(block, a % per_segment, numbers, seed)
    return lanes


def _block_lanes(block: NDArray[np.generic], at: int, numbers: _Words, seed: int) -> _Words:
    """Return the two lanes of segments `numbers`; rows of `block` begin at their element `at`."""
    width, (count, length) = block.itemsize, block.shape
    first, last = at * width // 8, -(-(at + length) * width // 8)
    keys = _word_keys(seed)[:, first:last]
    step = max(1, _STEP_BYTES // (8 * (last - first)))
    aligned = at * width % 8 == 0 and length * width % 8 == 0
    room = np.zeros((0 if aligned else min(step, count), (last - first) * 8 // width), block.dtype)
    begin = at - first * 8 // width
    total = np.zeros((LANES, count), np.uint64)
    upper = np.empty((min(step, count), last - first), np.uint64)
    for start in range(0, count, step):
        rows = block[start : start + step]
        if not aligned:
            room[: len(rows), begin : begin + length] = rows
            rows = room[: len(rows)]
        words = rows.view(np.uint64)
        high = np.right_shift(words, np.uint64(32), out=upper[: len(words)])
        for lane in range(LANES):
            sums = total[lane, start : start + step]
            np.einsum("rw,w->r", words, keys[2 * lane], out=sums)
            sums += np.einsum("rw,w->r", high, keys[2 * lane + 1])
    total *= _keys(numbers, range(_ROWS, _WORDS), seed)
    lanes: _Words = total.sum(1, dtype=np.uint64)
    return lanes


def _cover(box: Box, seed: int) -> int:
    """Return the cover of a box: the product, over the dims, of `_side`."""
    if not box_size(box):
        return 0
    cover = 1
    for dim, (lo, hi) in enumerate(box):
        cover = cover * _side(dim, lo, hi, seed) & _MASK
    return cover


@lru_cache(1024)
def _side(dim: int, lo: int, hi: int, seed: int) -> int:
    """Return the sum of the keys of indices lo to hi of a dim."""
    before = _key_sums(dim, seed)
    total = 0
    first, last = lo // _COVER_BLOCK, -(-hi // _COVER_BLOCK)
    for at in range(first, last, 1 << 16):
        blocks = np.arange(at, min(at + (1 << 16), last))
        stops = np.minimum(hi - blocks * _COVER_BLOCK, _COVER_BLOCK)
        sums = before[stops] - before[np.maximum(lo - blocks * _COVER_BLOCK, 0)]
        keys = _keys(blocks.astype(np.uint64), (_COVER + 2 * dim,), seed)[0]
        total += int((keys * sums).sum(dtype=np.uint64))
    return total & _MASK


@lru_cache(64)
def _key_sums(dim: int, seed: int) -> _Words:
    """Return cumulative sums of the keys of a dim's first 4096 indices."""
    places = np.arange(_COVER_BLOCK, dtype=np.uint64)
    keys = _keys(places, (_COVER + 2 * dim + 1,), seed)[0]
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(keys, dtype=np.uint64)])
