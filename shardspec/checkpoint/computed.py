"""Tensors whose bytes are made of others' when they are read, a part at a time.

To all that reads, maps and writes they are matrices in a file. What is made is kept for a while,
since it is made in larger parts than it is read in.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import (
    ZEROS,
    AnyOutline,
    Catalog,
    LazyTensorCache,
    StoredBox,
    StoredTensor,
    distinct,
)
from shardspec.checkpoint.read_boxes import Buffers, Checks, read_box_into
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.dtypes import item_bytes

_MOST_BYTES: Final = 4 << 20
"""Of a part that is made at once, where it is read with steps."""
_Made = TypeVar("_Made")


class Recent:
    """What was made last, of a bounded size; for all threads."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._held = most_bytes, 0
        self._lock = Lock()
        self._made: OrderedDict[object, tuple[Any, int]] = OrderedDict()

    def get(self, key: object, make: Callable[[], tuple[_Made, int]]) -> _Made:
        """Return what has a key; it is made, with its size, if it is not there any more."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                kept: _Made = self._made[key][0]
                return kept
        made, num_bytes = make()
        with self._lock:
            if key not in self._made:
                self._made[key] = made, num_bytes
                self._held += num_bytes
            while self._held > self._most and len(self._made) > 1:
                self._held -= self._made.popitem(last=False)[1][1]
        return made


class Source:
    """A tensor of a checkpoint as matrices, those of the last two dims, or rows of one."""

    def __init__(self, tensor: StoredTensor, spare: list[Buffers], matrix_dims: int = 2) -> None:
        self.tensor, self._checks = tensor, Checks(tensor)
        self._spare = spare
        """Memory that no thread uses just now; all tensors of a checkpoint share it."""
        self._dims = len(tensor.shape) - matrix_dims

    def rows(self, matrix: int, lo: int, hi: int, columns: Box = ()) -> NDArray[Any]:
        """Return some rows of a matrix, perhaps some columns of them, as unsigned integers."""
        shape = self.tensor.shape
        lead = np.unravel_index(matrix, shape[: self._dims]) if self._dims > 0 else ()
        inner = columns or tuple((0, size) for size in shape[self._dims + 1 :])
        box = (*((int(at), int(at) + 1) for at in lead), (lo, hi), *inner)
        return self.read(box).reshape(hi - lo, -1)

    def read(self, box: Box) -> NDArray[Any]:
        """Return the numbers of a box as unsigned integers."""
        sides = [hi - lo for lo, hi in box]
        found = np.empty(sides, f"u{item_bytes(self.tensor.dtype)}")
        room = found.reshape(-1).view(np.uint8).data
        try:
            buffers = self._spare.pop()
        except IndexError:
            buffers = Buffers()
        with OpenFiles() as files:
            read_box_into(self.tensor, box, room, files, buffers, self._checks)
        self._spare.append(buffers)
        return found


def bytes_in_files(outlines: Sequence[AnyOutline]) -> dict[StoragePath, int]:
    """Return the files that tensors lie in, and their bytes in each."""
    found: dict[StoragePath, int] = {}
    for outline in outlines:
        for stored in distinct(outline):
            computed = stored.computed if isinstance(stored, StoredBox) else None
            reads = {stored.path: outline.bytes_of(stored)}
            for path, num_bytes in (computed.reads if computed else reads).items():
                if path != ZEROS:
                    found[path] = found.get(path, 0) + num_bytes
    return found


class ComputedMatrices(ABC):
    """Matrices, one below the other, whose numbers are made when they are read."""

    def __init__(
        self, rows: int, columns: int, dtype: str, reads: Mapping[StoragePath, int]
    ) -> None:
        self.columns, self._type = columns, np.dtype(f"u{item_bytes(dtype)}")
        self._rows, self._reads = max(1, rows), reads

    @property
    def reads(self) -> Mapping[StoragePath, int]:
        """The files that it is made of, and the bytes of it in each."""
        return self._reads

    @abstractmethod
    def make(self, matrix: int, row: int, column: int, out: NDArray[Any]) -> None:
        """Fill `out` with a part of a matrix, from a row and a column on."""

    def fill(
        self, start: int, steps: Sequence[tuple[int, int, int]], room: memoryview, at: int
    ) -> None:
        """Fill a block with a part; see `BlockPart`."""
        width = self._type.itemsize
        wide = self.columns * width
        row, column = divmod(start, wide)
        *outer, (run, _, _) = steps
        entries = [*outer, (run // width, width, width)]
        down: list[tuple[int, int, int]] = []
        across: list[tuple[int, int, int]] = []
        """Per step the count, and how far it leads: here, in rows or columns, and in the block."""
        for place, (count, step, inside) in enumerate(entries):
            if step >= wide:
                down.append((count, step // wide, inside))
                continue
            of_row, here = wide // step, -(-(wide - column) // step)
            """How many are in a row, and in the first one."""
            if count <= here:
                across.append((count, step // width, inside))
            elif here == of_row and count % of_row == 0:
                down.append((count // of_row, 1, of_row * inside))
                across.append((of_row, step // width, inside))
            else:
                cut = here if here < of_row else count - count % of_row
                for first, some in ((0, cut), (cut, count - cut)):
                    part = [*entries[:place], (some, step, inside), *entries[place + 1 :]]
                    part.append((width, 1, 1))
                    self.fill(start + first * step, part, room, at + first * inside)
                return
        down, across = ([one for one in some if one[0] > 1] for some in (down, across))
        high = 1 + sum((count - 1) * by for count, by, _ in down)
        length = 1 + sum((count - 1) * by for count, by, _ in across)
        if high * length * width > max(_MOST_BYTES, wide) and down:
            (count, by, inside), *rest = down
            halves = (0, count // 2), (count // 2, count - count // 2)
            others = [(count, by * wide, i) for count, by, i in rest]
            others += [(count, by * width, i) for count, by, i in across]
            for first, some in halves:
                part = [(some, by * wide, inside), *others, (width, 1, 1)]
                self.fill(start + first * by * wide, part, room, at + first * inside)
            return
        numbers = [(by, inside) for _, by, inside in across]
        if numbers in ([], [(1, width)]) and [by for _, by, _ in down] in ([], [1]):
            stride = down[0][2] if down else length * width
            block = np.ndarray((high, length), self._type, room, at, (stride, width))
            self._parts(row, column // width, block)
            return
        made = np.empty((high, length), self._type)
        self._parts(row, column // width, made)
        counts = [many for many, _, _ in (*down, *across)]
        inner = [inside for _, _, inside in (*down, *across)]
        lies = [by * length * width for _, by, _ in down] + [by * width for _, by, _ in across]
        block = np.ndarray(counts, self._type, room, at, inner)
        np.copyto(block, np.ndarray(counts, self._type, made.data, 0, lies))

    def _parts(self, row: int, column: int, out: NDArray[Any]) -> None:
        """Fill `out` with what lies in one matrix after the other."""
        done = 0
        while done < len(out):
            matrix, first = divmod(row + done, self._rows)
            some = min(len(out) - done, self._rows - first)
            self.make(matrix, first, column, out[done : done + some])
            done += some


class ComputedCatalog(Catalog, ABC):
    """A checkpoint in which some tensors are made of others."""

    def __init__(self, base: Catalog, gone: Collection[str], made: Collection[str]) -> None:
        names = {*base.names} - {*gone} | {*made}
        home = base.directory
        super().__init__(base.format, home, names, base.files, base.mesh, base.extras)
        self.base, self._made = base, frozenset(made)
        self._spare: list[Buffers] = []
        self._tensors = LazyTensorCache(self._look_up)
        self.snapshot, self.below, self.beside = base.snapshot, base.below, base.beside
        self.file_metadata, self.notes, self.paths = base.file_metadata, base.notes, base.paths
        self.restored, self.dropped, self.filled = base.restored, base.dropped, base.filled
        self.described_in, self.keeps_dtype = base.described_in, base.keeps_dtype
        self.quantization = base.quantization

    @abstractmethod
    def _look_up(self, name: str) -> StoredTensor:
        """Return a tensor that is made."""

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor, one that is made or one of the checkpoint."""
        return self._tensors(name) if name in self._made else self.base.tensor(name)

    def outline(self, name: str) -> AnyOutline:
        """Return what is known of a tensor without reading the files of its boxes."""
        return self._tensors(name) if name in self._made else self.base.outline(name)

    def origin(self, name: str) -> Hashable:
        """Return a key that is equal for tensors at the same places."""
        return super().origin(name) if name in self._made else self.base.origin(name)

    def copies_agree(self, name: str) -> bool:
        """Say whether digests show that all replicas are equal."""
        return name not in self._made and self.base.copies_agree(name)
