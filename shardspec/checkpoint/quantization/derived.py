"""Computes tensors, such as dequantized weights, from stored tensors while they are read.

Readers treat computed tensors like stored ones. Tensors are computed in parts. Results are cached,
because a reader may request less than a part.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import (
    ZEROS,
    AnyOutline,
    Catalog,
    DerivedCatalog,
    StoredBox,
    StoredTensor,
    distinct,
    whole_box,
)
from shardspec.checkpoint.compare.coverage import check_tiling
from shardspec.checkpoint.convert.copy import Buffers, Checks, read_box_into
from shardspec.checkpoint.convert.numeric import narrow, numbers, strips
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.dtypes import bits_type, item_bytes
from shardspec.layout.spec import ShardingSpec

_MOST_BYTES: Final = 256 << 10
"""Maximum bytes of a part that is computed separately and copied; fits common L2 caches."""


class Recent:
    """Cache of limited size for the most recently used results; all threads share it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._lock = Lock()
        self._made: OrderedDict[object, NDArray[Any]] = OrderedDict()

    def get(self, key: object) -> NDArray[Any] | None:
        """Return the cached result of a key; None if it is not cached."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
            return self._made.get(key)

    def keep(self, key: object, made: NDArray[Any]) -> None:
        """Cache a result; evict the least recently used ones."""
        with self._lock:
            if key not in self._made:
                self._made[key] = made
                self._num_bytes += made.nbytes
            while self._num_bytes > self._most_bytes and len(self._made) > 1:
                self._num_bytes -= self._made.popitem(last=False)[1].nbytes


class Source:
    """Reads rows of a tensor, which is treated as a stack of matrices over its last two dims."""

    def __init__(self, tensor: StoredTensor, spare: list[Buffers], matrix_dims: int = 2) -> None:
        self.tensor, self._checks = tensor, Checks(tensor)
        self._spare = spare
        """Buffers that no thread uses at the moment; all tensors of a checkpoint share them."""
        self._dims = len(tensor.shape) - matrix_dims

    def rows(self, matrix: int, lo: int, hi: int, columns: Box = ()) -> NDArray[Any]:
        """Return rows `lo` to `hi` of one matrix, as unsigned integers with the same bits."""
        shape = self.tensor.shape
        lead = np.unravel_index(matrix, shape[: self._dims]) if self._dims > 0 else ()
        inner = columns or tuple((0, size) for size in shape[self._dims + 1 :])
        box = (*((int(at), int(at) + 1) for at in lead), (lo, hi), *inner)
        return self.read(box).reshape(hi - lo, -1)

    def read(self, box: Box) -> NDArray[Any]:
        """Return the elements of a box, as unsigned integers of the same bits."""
        sides = [hi - lo for lo, hi in box]
        values = np.empty(sides, bits_type(item_bytes(self.tensor.dtype)))
        room = values.reshape(-1).view(np.uint8).data
        try:
            buffers = self._spare.pop()
        except IndexError:
            buffers = Buffers()
        with OpenFiles() as files:
            read_box_into(self.tensor, box, room, files, buffers, self._checks)
        self._spare.append(buffers)
        return values


def as_matrices(tensor: StoredTensor) -> StoredTensor:
    """Return a tensor of fewer than two dims as a matrix; other tensors are unchanged."""
    more = (1,) * (2 - len(tensor.shape))
    boxes = (
        replace(
            stored,
            box=(*((0, 1) for _ in more), *stored.box),
            strides=stored.strides and (*(0 for _ in more), *stored.strides),
        )
        for stored in tensor.boxes
    )
    return replace(tensor, shape=(*more, *tensor.shape), boxes=tuple(boxes)) if more else tensor


def bytes_in_files(outlines: Sequence[AnyOutline]) -> dict[StoragePath, int]:
    """Return, for each file, the bytes to read from it to get these tensors."""
    sizes: dict[StoragePath, int] = {}
    for outline in outlines:
        for stored in distinct(outline):
            computed = stored.computed if isinstance(stored, StoredBox) else None
            reads = {stored.path: outline.bytes_of(stored)}
            for path, num_bytes in (computed.reads if computed else reads).items():
                if path != ZEROS:
                    sizes[path] = sizes.get(path, 0) + num_bytes
    return sizes


class ComputedMatrices(ABC):
    """Stacked matrices whose numbers are computed while they are read."""

    def __init__(
        self, rows: int, columns: int, dtype: str, reads: Mapping[StoragePath, int]
    ) -> None:
        self.rows, self.columns, self.dtype, self._reads = rows, columns, dtype, reads
        self._type = np.dtype(bits_type(item_bytes(dtype)))

    @property
    def reads(self) -> Mapping[StoragePath, int]:
        """Source file -> number of bytes that are read from it."""
        return self._reads

    @abstractmethod
    def make(self, matrix: int, row: int, column: int, out: NDArray[Any]) -> None:
        """Fill `out` with the part of a matrix that begins at a row and a column."""

    def fill(
        self, start: int, steps: Sequence[tuple[int, int, int]], room: memoryview, at: int
    ) -> None:
        """Copy a part of the tensor into a block of memory; see `Computed.fill`."""
        width = self._type.itemsize
        wide = self.columns * width
        row, column = start // wide, start % wide // width
        *outer, (run, _, _) = steps
        if not column and run % wide == 0:
            outer, run = [*outer, (run // wide, wide, wide)], wide
        entries = [step for step in (*outer, (run // width, width, width)) if step[0] > 1]
        down = [step for step in entries if step[1] >= wide]
        across = [step for step in entries if step[1] < wide]
        high = 1 + (start + sum((count - 1) * by for count, by, _ in entries)) // wide - row
        length = 1 + sum((count - 1) * by for count, by, _ in across) // width
        within = column + length <= self.columns and not any(by % wide for _, by, _ in down)
        if not within:  # whole rows are made
            column, length = 0, self.columns
        dense = (
            [by for _, by, _ in down] in ([], [wide]),
            [by for _, by, _ in across] in ([], [width]),
        )
        if within and all(dense):
            strides = [steps_in[0][2] if steps_in else width for steps_in in (down, across)]
            block = np.ndarray((high, length), self._type, room, at, strides)
            self._make_rows(row, column, block)
            return
        if high * length * width > _MOST_BYTES and high > 1:
            (count, by, inside), *rest = entries
            for first, many in ((0, count // 2), (count // 2, count - count // 2)):
                part = [(many, by, inside), *rest, (width, 1, 1)]
                self.fill(start + first * by, part, room, at + first * inside)
            return
        made = np.empty((high, length), self._type)
        self._make_rows(row, column, made)
        counts, steps_there, steps_in = zip(*entries, strict=True)
        made_strides = [by // wide * length * width + by % wide for by in steps_there]
        first = start - row * wide - column * width
        block = np.ndarray(counts, self._type, room, at, steps_in)
        np.copyto(block, np.ndarray(counts, self._type, made.data, first, made_strides))

    def _make_rows(self, row: int, column: int, out: NDArray[Any]) -> None:
        """Fill `out` with elements from (row, column) on; `row` counts through all matrices."""
        filled = 0
        while filled < len(out):
            matrix, first = divmod(row + filled, self.rows)
            count = min(len(out) - filled, self.rows - first)
            self.make(matrix, first, column, out[filled : filled + count])
            filled += count


class Recast(ComputedMatrices):
    """A stored tensor cast to another floating point dtype, with pending reductions finished."""

    def __init__(
        self,
        tensor: StoredTensor,
        dtype: str,
        spare: list[Buffers],
        others: Sequence[StoredTensor] = (),
    ) -> None:
        for each in (tensor, *others):
            check_tiling(each)
        self._tensor, self._source = tensor, Source(as_matrices(tensor), spare)
        rows, columns = self._source.tensor.shape[-2:]
        super().__init__(rows, columns, dtype, bytes_in_files([tensor, *others]))
        self.wide = "float64" if dtype == "float64" else "float32"
        """Dtype in which numbers are computed."""

    def tensor(self) -> StoredTensor:
        """Return the tensor with computed bytes."""
        tensor, box = self._tensor, whole_box(self._tensor.shape)
        boxes = (
            replace(first, box=box, addend=(), offset=0, digest=None, strides=None, computed=self)
            for first in tensor.boxes[:1]
        )
        return StoredTensor(tensor.name, tensor.shape, self.dtype, None, (), tuple(boxes))

    def parts(
        self, matrix: int, row: int, column: int, shape: tuple[int, ...]
    ) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield (rows, numbers) of the part of a matrix that begins at a row and a column."""
        raw = self._source.rows(matrix, row, row + shape[0], ((column, column + shape[1]),))
        for rows in strips(*shape):
            made = numbers(raw[rows].reshape(-1).view(np.uint8), self._source.tensor.dtype)
            yield rows, made.astype(self.wide, copy=False).reshape(-1, shape[1])

    def round(self, values: NDArray[Any]) -> NDArray[Any]:
        """Round numbers to the dtype of this tensor."""
        made = narrow(np.ascontiguousarray(values).reshape(-1), self.dtype)
        return numbers(made, self.dtype).reshape(values.shape)

    def make(self, matrix: int, row: int, column: int, out: NDArray[Any]) -> None:
        """Fill `out` with the part of a matrix that begins at a row and a column."""
        with np.errstate(all="ignore"):
            for rows, values in self.parts(matrix, row, column, out.shape):
                made = narrow(values, self.dtype).view(out.dtype)
                out[rows] = made.reshape(values.shape)


class ComputedCatalog(DerivedCatalog):
    """A checkpoint in which some tensors are computed from others."""

    def __init__(self, base: Catalog, replaced: Collection[str], made: Collection[str]) -> None:
        names = {*base.names} - {*replaced} | {*made}
        super().__init__(base, names, base.extras, base.mesh)
        self._made = frozenset(made)
        self._spare: list[Buffers] = []

    def _made_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        spec: ShardingSpec | None,
        source: StoredTensor,
        made: ComputedMatrices,
        strides: tuple[int, ...] | None = None,
    ) -> StoredTensor:
        """Return a tensor that `made` computes; its box gets path and rank from `source`."""
        if 0 in shape:
            return StoredTensor(name, shape, dtype, spec, (), ())
        first = source.boxes[0]
        box = StoredBox(whole_box(shape), (), first.rank, first.path, 0, None, strides, made)
        return StoredTensor(name, shape, dtype, spec, (), (box,))

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor, computed or from the checkpoint."""
        return super().tensor(name) if name in self._made else self.base.tensor(name)

    def outline(self, name: str) -> AnyOutline:
        """Return shape, dtype, spec and boxes of a tensor, without reading its files."""
        return super().outline(name) if name in self._made else self.base.outline(name)

    def origin(self, name: str) -> Hashable:
        """Return a key that is equal for tensors stored at the same place in a file."""
        return super().origin(name) if name in self._made else self.base.origin(name)

    def copies_agree(self, name: str) -> bool:
        """Return True if digests prove that all replicas are equal."""
        return name not in self._made and self.base.copies_agree(name)
