"""Digests of tensors: the formula of docs/digest.md, cuts of every kind, and faults."""

import json
import re
from itertools import pairwise, permutations, product
from math import prod

import numpy as np
import pytest

from shardspec import Digests
from shardspec.boxes import box_shape
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, LayoutError
from shardspec.resharding.digests import TensorDigest
from tests.test_readme import ROOT

MASK = 2**64 - 1
G = 0x9E3779B97F4A7C15


def mix(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def key(stream, number, seed):
    start = mix(seed + (stream + 1) * G & MASK)
    return mix(start + (number + 1) * G & MASK) | 1


def by_the_page(data, shape, width, seed=0):
    """The lanes and the cover, word by word, as docs/digest.md says it."""
    columns, dims = 1, list(shape)
    while dims and (columns == 1 or columns * width < 1024):
        columns *= dims.pop()
    segments = -(-columns * width // 16384)
    lanes = [0, 0]
    for row in range(prod(dims)):
        bytes_of_row = data[row * columns * width : (row + 1) * columns * width]
        for number in range(segments):
            segment = bytes_of_row[number * 16384 : (number + 1) * 16384]
            segment += bytes(-len(segment) % 8)
            for lane in range(2):
                total = 0
                for w in range(len(segment) // 8):
                    x = int.from_bytes(segment[8 * w : 8 * w + 8], "little")
                    total += x * key(2 + 2 * lane, w, seed) + (x >> 32) * key(3 + 2 * lane, w, seed)
                lanes[lane] += key(lane, row * segments + number, seed) * total
    cover = 0
    for index in np.ndindex(*shape):
        weight = 1
        for dim, at in enumerate(index):
            weight *= key(6 + 2 * dim, at // 4096, seed) * key(7 + 2 * dim, at % 4096, seed)
        cover += weight
    return tuple(number & MASK for number in (*lanes, cover))


def counting(shape, dtype):
    width = item_bytes(dtype)
    return np.resize(np.arange(256, dtype=np.uint8), prod(shape) * width)


def whole(data, shape, dtype, seed=0):
    numbers = data.view(f"u{item_bytes(dtype)}").reshape(shape)
    return TensorDigest.of_box(numbers, tuple((0, n) for n in shape), shape, dtype, seed)


@pytest.mark.parametrize(
    ("shape", "dtype", "seed"),
    [
        ((), "float32", 0),
        ((3,), "uint8", 0),
        ((4, 3), "float32", 7),
        ((3, 5, 2), "bfloat16", 2**64 - 1),
        ((2, 600), "bfloat16", 0),
        ((3, 9, 5, 13), "complex64", 0),
        ((8300,), "bfloat16", 1),
        ((2, 4097), "float32", 0),
        ((3, 3, 128), "int64", 0),
    ],
)
def test_the_sums_are_those_of_the_page(shape, dtype, seed):
    data = np.random.default_rng(1).integers(0, 256, prod(shape) * item_bytes(dtype), np.uint8)
    found = whole(data, shape, dtype, seed)
    assert found.sums == by_the_page(data.tobytes(), shape, item_bytes(dtype), seed)
    assert found.complete


def test_the_page_has_the_vectors():
    text = (ROOT / "docs" / "digest.md").read_text("utf-8")
    rows = re.findall(r"^\| (\w+) \| (\S+) \| ([0-9a-f]{32}) \|$", text, re.MULTILINE)
    assert len(rows) >= 6
    for dtype, sizes, value in rows:
        shape = () if sizes == "scalar" else tuple(map(int, sizes.split("×")))
        assert whole(counting(shape, dtype), shape, dtype).value == value, (dtype, shape)


DTYPES = [
    "bool",
    "uint8",
    "float8_e4m3fn",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
]


def cut_at_random(shape, rng):
    sides = []
    for n in shape:
        cuts = sorted({0, n, *rng.integers(0, n + 1, 2).tolist()})
        sides.append(list(pairwise(cuts)) or [(0, 0)])
    return list(product(*sides))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("longest", [(9000,), (120, 120), (12, 12, 12), (600, 3, 2)])
def test_boxes_add_up_however_a_tensor_is_cut(dtype, longest):
    rng, width = np.random.default_rng(len(longest)), item_bytes(dtype)
    for empty in (0, 1, 1, 1, 1):
        shape = tuple(int(n) for n in rng.integers(empty, np.array(longest) + 1))
        x = rng.integers(0, 256, (*shape, width), np.uint8).view(f"u{width}").reshape(shape)
        due, found = whole(x.reshape(-1).view(np.uint8), shape, dtype), TensorDigest(dtype, shape)
        boxes = cut_at_random(shape, rng)
        for at in rng.permutation(len(boxes)):
            part = x[tuple(slice(*side) for side in boxes[at])]
            part = part if at % 2 else np.asfortranarray(part)
            found += TensorDigest.of_box(part, boxes[at], shape, dtype)
        assert found == due


def test_pieces_of_bytes_add_up_wherever_they_end():
    shape, box = (5, 7, 300), ((1, 4), (2, 7), (10, 290))
    x = np.random.default_rng(2).integers(0, 2**16, box_shape(box), np.uint16)
    data, found = memoryview(x.tobytes()), TensorDigest("bfloat16", shape)
    for start, end in ((0, 1), (1, 281), (281, 2000), (2000, 4200)):
        found = found.with_bytes(data[2 * start : 2 * end], box, 2 * start)
    assert found == TensorDigest.of_box(x, box, shape, "bfloat16")


def test_the_cover_tells_gaps_and_overlaps_of_zeros():
    zeros = np.zeros((4, 6), np.uint8)
    left, right = ((0, 4), (0, 2)), ((0, 4), (2, 6))
    parts = [
        TensorDigest.of_box(zeros[:, a:b], box, (4, 6), "uint8")
        for box in (left, right)
        for (a, b) in (box[1],)
    ]
    assert (parts[0] + parts[1]).complete
    for wrong in (parts[0], parts[1], parts[0] + parts[0] + parts[1], parts[0] + parts[0]):
        assert not wrong.complete
        with pytest.raises(CheckpointError, match="'w'"):
            Digests({"w": wrong}).require_complete()


def test_parts_of_digests_add_up_and_gaps_and_overlaps_name_the_tensor():
    zeros = np.zeros((4, 6), np.uint8)
    rows = [
        Digests({"w": TensorDigest.of_box(zeros[a:b], ((a, b), (0, 6)), (4, 6), "uint8")})
        for a, b in ((0, 1), (1, 3), (3, 4))
    ]
    other = Digests({"v": whole(counting((3,), "int32"), (3,), "int32")})
    every = Digests({"w": whole(zeros, (4, 6), "uint8")})
    for order in permutations([*rows, other]):
        assert sum(order, Digests({})).require_complete() == every + other
    for wrong in (rows[:2], [*rows, rows[1]], [rows[0], rows[0]], rows[1:]):
        with pytest.raises(CheckpointError, match="'w'"):
            sum(wrong, Digests({})).require_complete()
    for twice in ([every, every], [every, rows[0]], [rows[2], every]):
        with pytest.raises(CheckpointError, match="'w'"):
            sum(twice, Digests({}))
    with pytest.raises(CheckpointError, match="seeds 0 and 3"):
        other + Digests({}, 3)
    with pytest.raises(CheckpointError, match=r"'v': .*\[3\] int32.*\[3\] int16"):
        other + Digests({"v": TensorDigest("int16", (3,))})
    # A part of zeros is not taken for the whole of them, whose lanes are equal.
    assert rows[0]["w"].value == every["w"].value
    assert rows[0].value != every.value
    assert "'w'" in rows[0].differences(every)[0]
    record = json.loads(json.dumps(rows[0].to_json()))
    assert Digests.from_json(record, "d.json") == rows[0]
    for spoiled in ("0" * 15, None, "1" * 16):
        entry = {**record["tensors"]["w"], "cover": spoiled}
        with pytest.raises(CheckpointError, match=r"^d\.json: "):
            Digests.from_json({**record, "tensors": {"w": entry}}, "d.json")


def faults(rng):
    def flip(y):
        y[tuple(rng.integers(16, size=2))] ^= np.uint16(1 << rng.integers(16))

    def swap(y):
        a, b = map(tuple, rng.integers(16, size=(2, 2)))
        y[a], y[b] = y[b], y[a]

    def signs(y):
        y ^= (rng.random((16, 16)) < rng.random()).astype(np.uint16) << 15

    def high(y):
        y[:, 1::2] ^= (rng.random((16, 8)) < 0.5).astype(np.uint16) << 15

    def rows(y):
        a, b = rng.integers(16, size=2)
        y[[a, b]] = y[[b, a]]

    def columns(y):
        a, b = rng.integers(16, size=2)
        y[:, [a, b]] = y[:, [b, a]]

    def shift(y):
        y[:] = np.roll(y, rng.integers(1, 256))

    def turn(y):
        y[:] = y.T

    def square(y):
        a, b = rng.integers(15, size=2)
        d = np.array([[1, -1], [-1, 1]]) * rng.integers(1, 65536)
        y[a : a + 2, b : b + 2] += d.astype(np.uint16)

    def lost(y):
        y[rng.integers(16) :, rng.integers(16) :] = 0

    def twice(y):
        y[1:] = y[0]

    def low(y):
        y[:] = y & 0xFF00

    return [flip, swap, signs, high, rows, columns, shift, turn, square, lost, twice, low]


def unnoticed(count, shape, box):
    """Return how many faults there were, and how many each lane has not seen, and both."""
    rng = np.random.default_rng(3)
    kinds, good = faults(rng), rng.integers(0, 65536, (16, 16), np.uint16)
    due, done, missed = TensorDigest.of_box(good, box, shape, "bfloat16"), 0, [0, 0, 0]
    for number in range(count):
        y = good.copy()
        kinds[number % len(kinds)](y)
        if (y == good).all():
            continue
        done += 1
        found = TensorDigest.of_box(y, box, shape, "bfloat16")
        same = [a == b for a, b in zip(found.sums[:2], due.sums[:2], strict=True)]
        missed = [m + s for m, s in zip(missed, (*same, all(same)), strict=True)]
    return done, missed


IN_ONE_ROW = (16, 16), ((0, 16), (0, 16))
IN_MANY_ROWS = (16, 512), ((0, 16), (100, 116))


@pytest.mark.parametrize("place", [IN_ONE_ROW, IN_MANY_ROWS])
def test_no_fault_of_twelve_kinds_goes_unseen(place):
    done, missed = unnoticed(3000, *place)
    assert done > 2500
    assert missed == [0, 0, 0]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", [IN_ONE_ROW, IN_MANY_ROWS])
def test_no_fault_of_a_million_goes_unseen(place):
    done, missed = unnoticed(550_000, *place)
    assert done >= 500_000
    assert missed == [0, 0, 0]


def test_what_does_not_belong_together_is_refused():
    a = whole(counting((4, 3), "int32"), (4, 3), "int32")
    for other in (
        TensorDigest("int32", (3, 4)),
        TensorDigest("float32", (4, 3)),
        TensorDigest("int32", (4, 3), seed=1),
    ):
        with pytest.raises(LayoutError, match="cannot be added"):
            a + other
    numbers = np.zeros((2, 3), np.int32)
    for box, dtype in (
        (((0, 3), (0, 3)), "int32"),
        (((3, 5), (0, 3)), "int32"),
        (((0, 2), (0, 3)), "int16"),
        (((0, 2),), "int32"),
    ):
        with pytest.raises(LayoutError, match="give the elements of the box"):
            TensorDigest.of_box(numbers, box, (4, 3), dtype)
    with pytest.raises(LayoutError, match=r"an array of .* >i4 is not"):
        TensorDigest.of_box(numbers.astype(">i4"), ((0, 2), (0, 3)), (4, 3), "int32")
    with pytest.raises(LayoutError, match="has seed 0, others have 5"):
        Digests({"w": a}, 5)


def test_differences_are_named():
    a = whole(counting((4, 3), "int32"), (4, 3), "int32")
    changed = whole(counting((4, 3), "int32")[::-1].copy(), (4, 3), "int32")
    other = whole(counting((4, 3), "float32"), (4, 3), "float32")
    found = Digests({"w": a, "x": a, "y": a, "z": a}).differences(
        Digests({"w": a, "x": changed, "y": other, "v": a})
    )
    assert found == [
        "tensor 'v' is only in the second",
        f"tensor 'x' has digest {a.value} in one and {changed.value} in the other",
        "tensor 'y' is [4, 3] int32 in one and [4, 3] float32 in the other",
        "tensor 'z' is only in the first",
    ]
    with pytest.raises(CheckpointError, match=r"'v' is only in the second \(and 3 other tensors\)"):
        Digests({"w": a, "x": a, "y": a, "z": a}).require_same(
            Digests({"w": a, "x": changed, "y": other, "v": a})
        )
    seeded = Digests({"w": whole(counting((4, 3), "int32"), (4, 3), "int32", 1)}, 1)
    with pytest.raises(CheckpointError, match="seed 0 and with seed 1"):
        Digests({"w": a}).differences(seeded)
    assert Digests({"w": a}).value != Digests({"x": a}).value != seeded.value


def test_a_file_of_digests_says_what_was_digested():
    a = whole(counting((4, 3), "int32"), (4, 3), "int32", 9)
    digests = Digests({"w": a, "é": a}, 9)
    record = json.loads(json.dumps(digests.to_json()))
    assert Digests.from_json(record, "d.json") == digests
    entry = record["tensors"]["w"]
    wrong = [
        ([], "has format"),
        ({**record, "format": "shardspec-digest-2"}, "has format 'shardspec-digest-2'"),
        ({**record, "seed": -1}, "no seed"),
        ({**record, "seed": True}, "no seed"),
        ({**record, "tensors": []}, "no seed"),
        ({**record, "value": "0" * 32}, "its value is"),
        ({**record, "tensors": {"w": entry}}, "its value is"),
        *(
            ({**record, "tensors": {"w": {**entry, **change}}}, "'w'")
            for change in (
                {"dtype": "I33"},
                {"dtype": None},
                {"shape": [-1]},
                {"shape": "4"},
                {"shape": [2**62, 4]},
                {"value": "A" * 32},
                {"value": "0" * 31},
                {"value": 0},
            )
        ),
    ]
    for found, problem in wrong:
        with pytest.raises(CheckpointError, match=rf"^d\.json: .*{re.escape(problem)}"):
            Digests.from_json(found, "d.json")


def test_strided_columns_have_the_digest_of_their_values():
    for dtype in ("u1", "i2", "f4", "f8"):
        wide = np.arange(48).astype(dtype).reshape(8, 6)
        for part in (wide[:, 2:3], wide[::2, 5:], wide.T[1:2], wide[::-1, :1], wide[3:4, ::2]):
            box = tuple((0, n) for n in part.shape)
            digests = [
                TensorDigest.of_box(array, box, part.shape, NAMES[dtype])
                for array in (part, np.ascontiguousarray(part))
            ]
            assert digests[0] == digests[1]


NAMES = {"u1": "uint8", "i2": "int16", "f4": "float32", "f8": "float64"}


@pytest.mark.parametrize("shape", [(0, 2**62), (2**62, 0), (3, 0, 2**61), (0,)])
def test_a_tensor_without_elements_is_digested_at_once(shape):
    box = tuple((0, n) for n in shape)
    digest = TensorDigest.of_box(np.empty(shape, np.uint8), box, shape, "uint8")
    assert digest.complete
    assert digest.value == "0" * 32
    stored = Digests({"w": digest}).to_json()
    assert Digests.from_json(stored, "file")["w"] == digest
