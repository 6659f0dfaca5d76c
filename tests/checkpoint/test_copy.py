"""Any box out of any grid of stored boxes, against numpy's own slices."""

import os
import subprocess
import sys
import zlib
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardspec.boxes import slices_within
from shardspec.checkpoint.catalog import Digest, StoredBox, StoredTensor
from shardspec.checkpoint.moving.behind import Behind
from shardspec.checkpoint.moving.buffers import Buffers
from shardspec.checkpoint.moving.copy import copy_box
from shardspec.checkpoint.moving.digests import Checks
from shardspec.checkpoint.moving.pieces import Block, Place, Run, byte_box, offset_in, pieces
from shardspec.checkpoint.moving.regions import read_region
from shardspec.checkpoint.moving.rows import rows_of
from shardspec.checkpoint.moving.sinks import FileSink, MemorySink
from shardspec.checkpoint.source_files import OpenFiles, SourceFile
from shardspec.errors import CheckpointError

DTYPES = {"uint8": 1, "int16": 2, "float32": 4, "complex64": 8}


class SmallBuffers(Buffers):
    """Buffers of a few bytes, so that small tensors take every path that large ones do."""

    def __init__(self, num_bytes, row_bytes):
        super().__init__()
        self.row_bytes = row_bytes
        self.block = self.block[:num_bytes]
        self.scratch = self.scratch[:num_bytes]


@st.composite
def cut_tensors(draw):
    """A tensor, cuts along its dims, a box of it, sizes of buffers and of rows that are long."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    target = []
    for size in shape:
        a, b = draw(st.integers(0, size)), draw(st.integers(0, size))
        target.append((min(a, b), max(a, b)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    sizes = draw(st.sampled_from([8, 16, 64, 4096])), draw(st.sampled_from([1, 8, 2048]))
    return shape, cuts, tuple(target), dtype, sizes


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
            boxes.append(StoredBox(box, (), 0, path, offset, digest))
            offset += file.write(data)
    return tuple(boxes)


def stored_tensor(path, shape, cuts, dtype):
    """Make a tensor of any bits and put the boxes of a grid into a file."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (*shape, DTYPES[dtype]), np.uint8)
    array = raw.view(f"V{DTYPES[dtype]}").reshape(shape)
    return array, StoredTensor("w", shape, dtype, None, (), store(path, array, cuts))


@settings(max_examples=500)
@given(cut_tensors())
def test_any_box_out_of_any_grid(tmp_path_factory, drawn):
    shape, cuts, target, dtype, (num_bytes, row_bytes) = drawn
    path = tmp_path_factory.mktemp("copy") / "data"
    array, tensor = stored_tensor(path, shape, cuts, dtype)
    expected = array[tuple(slice(lo, hi) for lo, hi in target)].tobytes()
    buffers = SmallBuffers(num_bytes, row_bytes)
    out = np.zeros(len(expected), np.uint8)
    written: list[int] = []
    copied = path.with_name("out")
    with OpenFiles() as files:
        copy_box(tensor, target, MemorySink(out.data), files, buffers)
        with (
            copied.open("w+b") as file,
            Behind(file.fileno(), copied, block_bytes=num_bytes) as behind,
        ):
            sink = FileSink("w", 3, behind, written.append, digested=True, checked=True)
            checks = Checks(tensor)
            copy_box(tensor, target, sink, files, buffers, checks=checks)
        assert sink.crc32 == zlib.crc32(expected)
        checks.finish(files)
    assert not any(stored in checks for stored in tensor.boxes)
    assert out.tobytes() == expected
    assert sum(written) == len(expected)
    assert copied.read_bytes()[3:] == expected


class Changed:
    """A flush after which one byte of a file is another."""

    def __init__(self, at):
        self._at = at

    def __call__(self, fd):
        (byte,) = os.pread(fd, 1, self._at)
        os.pwrite(fd, bytes([byte ^ 1]), self._at)


def move_end_to_end(tensor, buffers, out):
    """Copy a whole tensor, its digests taken on what is read back; return the CRC-32 of it."""
    whole = tuple((0, size) for size in tensor.shape)
    checks = Checks(tensor)
    with OpenFiles() as files, out.open("w+b") as file:
        block_bytes = len(buffers.block)
        with Behind(file.fileno(), out, beside=False, block_bytes=block_bytes) as behind:
            sink = FileSink(
                "w", 3, behind, lambda _: None, digested=True, checked=True, end_to_end=True
            )
            copy_box(tensor, whole, sink, files, buffers, checks=checks)
            checks.finish(files)
    return sink.crc32, [(arrival.crc32, value) for arrival, value in checks.in_part]


def arrives(tensor, buffers, out):
    """Return whether all of a tensor is found to be in its place."""
    try:
        _, in_part = move_end_to_end(tensor, buffers, out)
    except CheckpointError as error:
        if "w was read back differently" in str(error):
            return False
        raise
    return all(found == expected for found, expected in in_part)


@settings(max_examples=500)
@given(cut_tensors(), st.data())
def test_digests_taken_on_what_is_read_back(tmp_path_factory, drawn, data):
    shape, cuts, _, dtype, (num_bytes, row_bytes) = drawn
    path = tmp_path_factory.mktemp("copy") / "data"
    array, tensor = stored_tensor(path, shape, cuts, dtype)
    buffers, out = SmallBuffers(num_bytes, row_bytes), path.with_name("out")
    crc, in_part = move_end_to_end(tensor, buffers, out)
    assert (crc, in_part) == (zlib.crc32(array.tobytes()), [])
    assert arrives(tensor, buffers, out)
    assert out.read_bytes()[3:] == array.tobytes()
    # Any byte that does not arrive is missed, and so is any that was changed before.
    at = 3 + data.draw(st.integers(0, array.nbytes - 1))
    with mock.patch.object(os, "fsync", Changed(at)):
        assert not arrives(tensor, buffers, out)
    boxes = list(tensor.boxes)
    number = data.draw(st.integers(0, len(boxes) - 1))
    digest = boxes[number].digest
    boxes[number] = replace(boxes[number], digest=replace(digest, crc32=digest.crc32 ^ 1))
    with pytest.raises(CheckpointError, match=r"tensor 'w': .* was saved"):
        move_end_to_end(replace(tensor, boxes=tuple(boxes)), buffers, out)


def test_a_box_of_which_a_part_is_judged_where_it_arrives(tmp_path):
    """Its first rows lie beside long ones, its last beside one that is too short to be read."""
    array = np.random.default_rng(2).integers(0, 256, (6, 16), np.uint8)
    sides = [((0, 6), (0, 8)), ((0, 3), (8, 16)), ((3, 6), (8, 15)), ((3, 6), (15, 16))]
    path = tmp_path / "data"
    tensor = StoredTensor("w", (6, 16), "uint8", None, (), store_boxes(path, array, sides))
    buffers, out = SmallBuffers(64, 4), tmp_path / "out"
    first = zlib.crc32(array[:3, :8].tobytes())
    crc, in_part = move_end_to_end(tensor, buffers, out)
    assert (crc, in_part) == (zlib.crc32(array.tobytes()), [(first, first)])
    with mock.patch.object(os, "fsync", Changed(3 + 16 + 5)):
        _, ((found, expected),) = move_end_to_end(tensor, buffers, out)
    assert (found == first, expected) == (False, first)
    # Before it arrived, the same is told from what its digest says.
    (byte,) = path.read_bytes()[5 + 13 : 5 + 14]
    with path.open("r+b") as file:
        file.seek(5 + 13)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointError, match=r"tensor 'w': .*box \[0:6, 0:8\] .* was saved"):
        move_end_to_end(tensor, buffers, out)


def place(box, offset=0):
    return Place(box, StoredBox(box, (), 0, Path("x"), offset))


def test_whole_rows_are_runs_and_columns_are_blocks():
    rows = [place(((0, 3), (0, 8)), 100), place(((3, 5), (0, 8)), 200)]
    found = list(pieces(((0, 5), (0, 8)), rows, 16))
    assert found == [Run(rows[0].stored, 100, 0, 24), Run(rows[1].stored, 200, 24, 16)]
    columns = [place(((0, 5), (0, 3))), place(((0, 5), (3, 8)))]
    assert list(pieces(((0, 5), (0, 8)), columns, 16)) == [
        Block(((0, 2), (0, 8)), tuple(columns), 0, 16),
        Block(((2, 4), (0, 8)), tuple(columns), 16, 16),
        Block(((4, 5), (0, 8)), tuple(columns), 32, 8),
    ]
    # Rows longer than a block are copied part by part.
    found = list(pieces(((0, 2), (0, 8)), columns, 4))
    assert [(p.target_offset, p.num_bytes) for p in found] == [(0, 3), (3, 5), (8, 3), (11, 5)]
    assert all(isinstance(p, Run) for p in found)


def test_part_of_the_rows_of_a_box_is_still_one_run():
    rows = [place(((0, 6), (0, 8)), 100)]
    assert list(pieces(((2, 5), (0, 8)), rows, 16)) == [Run(rows[0].stored, 116, 0, 24)]
    # But not where the wanted rows are shorter than the stored ones.
    found = list(pieces(((2, 5), (0, 4)), rows, 16))
    assert [type(piece) for piece in found] == [Block]


def test_offsets():
    assert byte_box(((1, 2), (3, 5)), 4) == ((1, 2), (12, 20))
    assert byte_box((), 2) == ((0, 2),)
    assert offset_in(((10, 20), (0, 8)), (12, 3)) == 19


def test_reading_skips_gaps_of_a_page_and_reads_shorter_ones_along(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 4096)
    reads = []
    real = os.preadv

    def counting(fd, buffers, offset):
        count = real(fd, buffers, offset)
        reads.append((offset, count))
        return count

    # Counts what is asked of the system; the reading itself is real.
    monkeypatch.setattr(os, "preadv", counting)
    scratch = memoryview(bytearray(1 << 20))
    out = np.empty((4, 16), np.uint8)
    with SourceFile(path) as file:
        read_region(file, 0, ((0, 64), (0, 8192)), ((2, 6), (256, 272)), out, scratch)
        assert reads == [(8192 * row + 256, 16) for row in range(2, 6)]
        assert out.tolist() == [list(range(16))] * 4
        reads.clear()
        read_region(file, 0, ((0, 64), (0, 512)), ((2, 6), (256, 272)), out, scratch)
        assert reads == [(512 * 2 + 256, 512 * 3 + 16)]
        assert out.tolist() == [list(range(16))] * 4


def test_a_file_that_is_cut_short_meanwhile(tmp_path):
    array = np.zeros((10, 10), np.uint8)
    path = tmp_path / "data"
    boxes = store(path, array, [[0, 10], [0, 10]])
    os.truncate(path, 50)
    tensor = StoredTensor("w", array.shape, "uint8", None, (), boxes)
    out = tmp_path / "out"
    with OpenFiles() as files, out.open("w+b") as file, Behind(file.fileno(), out) as behind:
        sink = FileSink("w", 0, behind, lambda _: None)
        with pytest.raises(CheckpointError, match=r"data: ends at byte 50, but bytes up to 105"):
            copy_box(tensor, ((0, 10), (0, 10)), sink, files, Buffers())


WIDE = [[0, 3000], [0, 100, 300]]
"""Two boxes of columns, with more rows than one call reads."""


def read_wide(path, array, row_bytes, target=((0, 3000), (0, 300))):
    """Store an array in `WIDE` boxes; return them, and what reads a part and checks digests."""
    tensor = StoredTensor("w", array.shape, "uint8", None, (), store(path, array, WIDE))
    return tensor, lambda: _read(tensor, target, row_bytes)


def _read(tensor, target, row_bytes):
    buffers, checks = Buffers(), Checks(tensor)
    buffers.row_bytes = row_bytes
    out = bytearray((target[0][1] - target[0][0]) * (target[1][1] - target[1][0]))
    with OpenFiles() as files:
        copy_box(tensor, target, MemorySink(memoryview(out)), files, buffers, checks=checks)
    return out, [stored in checks for stored in tensor.boxes]


@pytest.mark.parametrize("row_bytes", [1, 150, 2048])
def test_rows_read_to_their_places(tmp_path, row_bytes):
    array = np.random.default_rng(1).integers(0, 256, (3000, 300), np.uint8)
    _, read = read_wide(tmp_path / "data", array, row_bytes)
    assert read() == (array.tobytes(), [False, False])
    part = ((1000, 2900), (50, 300))
    _, read = read_wide(tmp_path / "data", array, row_bytes, part)
    # Of the first box only some columns were read, of the second not all rows.
    assert read() == (array[1000:2900, 50:].tobytes(), [True, True])


@pytest.mark.parametrize("row_bytes", [1, 2048])
def test_a_flipped_bit_in_columns(tmp_path, row_bytes):
    array = np.zeros((3000, 300), np.uint8)
    tensor, read = read_wide(tmp_path / "data", array, row_bytes)
    for stored in tensor.boxes:
        for at in (0, 123_456, stored.digest.num_bytes - 1):
            with stored.path.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"\x04", stored.offset + at)
                with pytest.raises(CheckpointError, match=r"tensor 'w': rank 0's box .* CRC-32"):
                    read()
                os.pwrite(file.fileno(), b"\0", stored.offset + at)
    assert read()[1] == [False, False]


def test_a_system_that_reads_little_at_a_time(tmp_path, monkeypatch):
    """As it does when a signal comes; and a file that ends too early is still named."""
    array = np.random.default_rng(1).integers(0, 256, (3000, 300), np.uint8)
    tensor, read = read_wide(tmp_path / "data", array, 1)
    preadv, counts = os.preadv, iter([0, *range(1, 10**6)])

    def little(fd, parts, offset):
        return preadv(fd, [parts[0][: 1 + next(counts) % 250]], offset)

    monkeypatch.setattr(os, "preadv", little)
    assert read() == (array.tobytes(), [False, False])
    os.truncate(tensor.boxes[1].path, 500_000)
    with pytest.raises(CheckpointError, match="data: ends at byte 500000, but bytes up to"):
        read()


def test_what_is_read_as_rows():
    """Long rows that follow one another in every file; all others are for numpy."""
    halves = (place(((0, 8), (0, 4))), place(((0, 8), (4, 12)), 100))
    block = Block(((2, 5), (0, 12)), halves, 24, 36)
    found = rows_of(block, 4) or []
    assert [(rows.start, rows.num_bytes) for rows in found] == [(8, 12), (116, 24)]
    assert [(s.start, s.stop) for s in found[1].places] == [(4, 12), (16, 24), (28, 36)]
    assert rows_of(block, 5) is None
    assert rows_of(Block(((2, 5), (1, 12)), halves, 0, 33), 1) is None
    assert rows_of(Block(((2, 3), (1, 12)), halves, 0, 11), 1) is not None
    columns = StoredBox(((0, 8), (4, 12)), (), 0, Path("x"), 0, strides=(1, 8))
    assert rows_of(Block(block.box, (halves[0], Place(columns.box, columns)), 24, 36), 1) is None
    cube = Block(
        ((1, 3), (2, 4), (0, 5)),
        (place(((0, 4), (2, 4), (0, 3))), place(((0, 4), (2, 4), (3, 5)))),
        0,
        20,
    )
    assert [s.start for s in (rows_of(cube, 1) or [])[0].places] == [0, 5, 10, 15]


def test_long_rows_need_no_numpy(tmp_path):
    """Its import takes as long as copying a tenth of a GiB."""
    array = np.zeros((3000, 300), np.uint8)
    store(tmp_path / "data", array, WIDE)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from shardspec.checkpoint.moving.buffers import Buffers\n"
        "from shardspec.checkpoint.moving.copy import copy_box\n"
        "from shardspec.checkpoint.source_files import OpenFiles\n"
        "from shardspec.checkpoint.moving.sinks import MemorySink\n"
        "from shardspec.checkpoint.catalog import StoredBox, StoredTensor\n"
        f"path = Path({str(tmp_path / 'data')!r})\n"
        "boxes = [((0, 3000), (0, 100)), ((0, 3000), (100, 300))]\n"
        "stored = [StoredBox(b, (), 0, path, 5 + o) for b, o in zip(boxes, (0, 300000))]\n"
        "tensor = StoredTensor('w', (3000, 300), 'uint8', None, (), tuple(stored))\n"
        "buffers = Buffers()\n"
        "buffers.row_bytes = int(sys.argv[1])\n"
        "with OpenFiles() as files:\n"
        "    out = MemorySink(memoryview(bytearray(900000)))\n"
        "    copy_box(tensor, ((0, 3000), (0, 300)), out, files, buffers)\n"
        "print('numpy' in sys.modules)\n"
    )
    for row_bytes, needed in (("100", "False\n"), ("101", "True\n")):
        command = [sys.executable, "-c", program, row_bytes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == needed


def strided(path, base, view):
    """Return a box of a view of an array that lies whole in a file."""
    start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    box = tuple((0, size) for size in view.shape)
    return StoredBox(box, (), 0, path, start, strides=view.strides)


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
                copy_box(tensor, target, MemorySink(out.data), files, buffers)
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
        copy_box(tensor, ((0, 300),), MemorySink(out.data), files, Buffers())
        assert len(os.listdir("/dev/fd")) - before <= 128
    assert len(os.listdir("/dev/fd")) == before
    assert (out == array).all()
