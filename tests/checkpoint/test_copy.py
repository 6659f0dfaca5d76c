"""Any box out of any grid of stored boxes, against numpy's own slices."""

import os
import zlib
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardspec.boxes import slices_within
from shardspec.checkpoint.catalog import Digest, StoredBox, StoredTensor
from shardspec.checkpoint.convert.copy import (
    Buffers,
    Checks,
    read_box,
    read_box_into,
)
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.errors import CheckpointError

DTYPES = {"uint8": 1, "int16": 2, "float32": 4, "complex64": 8}


class SmallBuffers(Buffers):
    """Buffers of a few bytes, so that small tensors take every path that large ones do."""

    def __init__(self, num_bytes):
        super().__init__()
        self.block = self.block[:num_bytes]
        self.scratch = self.scratch[:num_bytes]


@st.composite
def cut_tensors(draw):
    """A tensor, cuts along its dims, a box of it, size of buffers."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    target = []
    for size in shape:
        a, b = draw(st.integers(0, size)), draw(st.integers(0, size))
        target.append((min(a, b), max(a, b)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    return shape, cuts, tuple(target), dtype, draw(st.sampled_from([8, 16, 64, 4096]))


def store(path, array, cuts):
    """Put the boxes of a grid one after the other into a file."""
    return store_boxes(path, array, product(*(list(pairwise(sides)) for sides in cuts)))


def store_boxes(path, array, sides):
    """Put boxes one after the other into a file."""
    boxes, offset = [], 5
    whole = tuple((0, size) for size in array.shape)
    with path.open("wb") as file:
        file.write(b"-" * offset)
        for box in sides:
            data = np.ascontiguousarray(array[slices_within(box, whole)]).tobytes()
            digest = Digest(zlib.crc32(data), offset, len(data))
            boxes.append(StoredBox(box, (), 0, LocalPath(path), offset, digest))
            offset += file.write(data)
    return tuple(boxes)


def stored_tensor(path, shape, cuts, dtype):
    """Make a tensor of any bits and put the boxes of a grid into a file."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (*shape, DTYPES[dtype]), np.uint8)
    array = raw.view(f"V{DTYPES[dtype]}").reshape(shape)
    return array, StoredTensor("w", shape, dtype, None, (), store(path, array, cuts))


@settings(max_examples=150)
@given(cut_tensors())
def test_any_box_out_of_any_grid(tmp_path_factory, drawn):
    shape, cuts, target, dtype, num_bytes = drawn
    path = tmp_path_factory.mktemp("copy") / "data"
    array, tensor = stored_tensor(path, shape, cuts, dtype)
    expected = array[tuple(slice(lo, hi) for lo, hi in target)].tobytes()
    buffers = SmallBuffers(num_bytes)
    out = np.zeros(len(expected), np.uint8)
    parts = bytearray(len(expected))
    with OpenFiles() as files:
        read_box_into(tensor, target, out.data, files, buffers)
        checks = Checks(tensor)
        at = 0
        for block, crc in read_box(tensor, target, files, buffers, checks):
            assert crc in (None, zlib.crc32(block))
            parts[at : at + len(block)] = block
            at += len(block)
        checks.finish(files)
    assert not any(stored in checks for stored in tensor.boxes)
    assert out.tobytes() == expected
    assert (at, parts) == (len(expected), expected)


def test_a_file_that_is_cut_short_meanwhile(tmp_path):
    array = np.zeros((10, 10), np.uint8)
    path = tmp_path / "data"
    boxes = store(path, array, [[0, 10], [0, 10]])
    os.truncate(path, 50)
    tensor = StoredTensor("w", array.shape, "uint8", None, (), boxes)
    with (
        OpenFiles() as files,
        pytest.raises(CheckpointError, match=r"data: ends at byte 50, but bytes up to 105"),
    ):
        read_box_into(tensor, ((0, 10), (0, 10)), memoryview(bytearray(100)), files, Buffers())


WIDE = [[0, 3000], [0, 100, 300]]
"""Two boxes of columns, with more rows than one call reads."""


def read_wide(path, array, target=((0, 3000), (0, 300))):
    """Store an array in `WIDE` boxes; return them, and what reads a part and checks digests."""
    tensor = StoredTensor("w", array.shape, "uint8", None, (), store(path, array, WIDE))
    return tensor, lambda: _read(tensor, target)


def _read(tensor, target):
    buffers, checks = Buffers(), Checks(tensor)
    out = bytearray(prod(hi - lo for lo, hi in target))
    with OpenFiles() as files:
        read_box_into(tensor, target, memoryview(out), files, buffers, checks=checks)
    return out, [stored in checks for stored in tensor.boxes]


def test_rows_read_to_their_places(tmp_path):
    array = np.random.default_rng(1).integers(0, 256, (3000, 300), np.uint8)
    _, read = read_wide(tmp_path / "data", array)
    assert read() == (array.tobytes(), [False, False])
    part = ((1000, 2900), (50, 300))
    _, read = read_wide(tmp_path / "data", array, part)
    # Of the first box only some columns were read, of the second not all rows.
    assert read() == (array[1000:2900, 50:].tobytes(), [True, True])


@pytest.mark.parametrize("shape", [(40, 9000), (3, 5, 9000)])
def test_long_rows_to_their_places(tmp_path, shape):
    array = np.random.default_rng(2).integers(0, 256, shape, np.uint8)
    cuts = [*([0, size] for size in shape[:-1]), [0, 2100, 4500, 9000]]
    tensor = StoredTensor("w", shape, "uint8", None, (), store(tmp_path / "data", array, cuts))
    for first in (0, 1):
        target = ((first, shape[0]), *((0, size) for size in shape[1:]))
        out, checked = _read(tensor, target)
        assert out == array[first:].tobytes()
        assert checked == [first > 0] * 3
    with (tmp_path / "data").open("r+b") as file:
        file.seek(tensor.boxes[1].offset + 7)
        file.write(bytes([array[(0,) * (len(shape) - 1)][2107] ^ 1]))
    with pytest.raises(CheckpointError, match=r"tensor 'w': rank 0's box .* CRC-32"):
        _read(tensor, tuple((0, size) for size in shape))


def test_a_flipped_bit_in_columns(tmp_path):
    array = np.zeros((3000, 300), np.uint8)
    tensor, read = read_wide(tmp_path / "data", array)
    for stored in tensor.boxes:
        for at in (0, 123_456, stored.digest.num_bytes - 1):
            with Path(stored.path).open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"\x04", stored.offset + at)
                with pytest.raises(CheckpointError, match=r"tensor 'w': rank 0's box .* CRC-32"):
                    read()
                os.pwrite(file.fileno(), b"\0", stored.offset + at)
    assert read()[1] == [False, False]


def test_a_system_that_reads_little_at_a_time(tmp_path, monkeypatch):
    """As it does when a signal comes; and a file that ends too early is still named."""
    array = np.random.default_rng(1).integers(0, 256, (3000, 300), np.uint8)
    tensor, read = read_wide(tmp_path / "data", array)
    preadv, counts = os.preadv, iter([0, *range(1, 10**6)])

    def little(fd, parts, offset):
        return preadv(fd, [parts[0][: 1 + next(counts) % 250]], offset)

    monkeypatch.setattr(os, "preadv", little)
    assert read() == (array.tobytes(), [False, False])
    os.truncate(tensor.boxes[1].path, 500_000)
    with pytest.raises(CheckpointError, match="data: ends at byte 500000, but bytes up to"):
        read()


def strided(path, base, view):
    """Return a box of a view of an array that lies whole in a file."""
    start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    box = tuple((0, size) for size in view.shape)
    return StoredBox(box, (), 0, LocalPath(path), start, strides=view.strides)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_boxes_that_are_not_row_major(tmp_path, dtype):
    base = np.arange(7 * 5 * 300, dtype=dtype).reshape(7, 5, 300)
    path = tmp_path / "data"
    path.write_bytes(base.tobytes())
    views = [
        base.transpose(2, 0, 1),
        base.transpose(1, 2, 0)[1:4, 5:200, 2:],
        base[1::2, ::3, 10:],
        base[:, :, ::7],
        np.broadcast_to(base[:, 2:3, :], (7, 4, 300)),
        np.lib.stride_tricks.as_strided(base, (2, 1000), (8, 8)),
        base[3, 2],
        base[3, 2, 5:6].reshape(()),
    ]
    with OpenFiles() as files:
        for view in views:
            tensor = StoredTensor("w", view.shape, dtype, None, (), (strided(path, base, view),))
            for small in (False, True):
                target = tuple((size // 3, size) if small else (0, size) for size in view.shape)
                wanted = view[tuple(slice(lo, hi) for lo, hi in target)]
                out = np.zeros(wanted.size * wanted.itemsize, np.uint8)
                buffers = Buffers()
                buffers.scratch = buffers.scratch[:4096]
                buffers.block = buffers.block[:8192]
                read_box_into(tensor, target, out.data, files, buffers)
                assert out.tobytes() == wanted.tobytes()


def test_more_files_than_are_kept_open(tmp_path):
    array = np.arange(300, dtype=np.uint8)
    boxes = []
    for row in range(300):
        path = tmp_path / f"data{row}"
        (box,) = store(path, array[row : row + 1], [[0, 1]])
        boxes.append(replace(box, box=((row, row + 1),)))
    tensor = StoredTensor("w", (300,), "uint8", None, (), tuple(boxes))
    out = np.zeros(300, np.uint8)
    before = len(os.listdir("/dev/fd"))
    with OpenFiles() as files:
        read_box_into(tensor, ((0, 300),), out.data, files, Buffers())
        assert len(os.listdir("/dev/fd")) - before <= 128
    assert len(os.listdir("/dev/fd")) == before
    assert (out == array).all()
