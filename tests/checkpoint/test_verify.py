"""Verifying and comparing checkpoints: what is found, and where it is said to be."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from shardspec import DeviceMesh, DTensor, save_sharded
from shardspec.checkpoint.catalog import Catalog, StoredBox, StoredTensor
from shardspec.checkpoint.compare.coverage import check_replicas
from shardspec.checkpoint.compare.diff import DiffExtent, diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.convert.numeric import numbers
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.handmade import handmade, sample

MESH = DeviceMesh(range(6), (2, 3))
HUGE = torch.full((1,), 1e300, dtype=torch.float64)


def save(directory, **tensors):
    save_sharded({name: DTensor(t, MESH, s) for name, (t, s) in tensors.items()}, directory)
    return directory


def flip(stored, at):
    data = bytearray(Path(stored.path).read_bytes())
    data[stored.offset + at] ^= 1
    Path(stored.path).write_bytes(data)


def test_every_flip_is_found_and_all_are_listed(tmp_path):
    w = torch.arange(77, dtype=torch.int32).view(7, 11)
    ckpt = save(tmp_path / "ckpt", a=(w, "[S0,S1]"), b=(w, "[R,S0]"))
    report = verify_checkpoint(ckpt)
    assert (report.tensors, report.boxes, report.flaws) == (2, 8, ())
    assert report.num_bytes == report.digested_bytes == 2 * 77 * 4
    flip(open_checkpoint(ckpt).tensor("a").boxes[4], 3)
    flip(open_checkpoint(ckpt).tensor("b").boxes[1], 0)
    with pytest.raises(CheckpointError, match="tensor 'a': rank 4's box"):
        verify_checkpoint(ckpt)
    flaws = verify_checkpoint(ckpt, every=True).flaws
    assert [flaw.split(" has CRC-32")[0].split(" in ")[0] for flaw in flaws] == [
        "tensor 'a': rank 4's box [4:7, 4:8]",
        "tensor 'b': rank 5's box [0:7, 6:11]",
    ]


def test_replicas_that_disagree_without_digests(tmp_path):
    ckpt = handmade(sample(), replicas=True).write(tmp_path / "ckpt")
    assert verify_checkpoint(ckpt).digested_bytes == 0
    flip(open_checkpoint(ckpt).tensor("b").boxes[0], 0)
    with pytest.raises(CheckpointError, match="claim different data"):
        verify_checkpoint(ckpt)


def test_the_first_difference_by_exhaustion(tmp_path):
    w = torch.arange(35.0).view(5, 7)
    a = save(tmp_path / "a", w=(w, "[S0,S1]"))
    mesh_of = {(b.box): b.rank for b in open_checkpoint(a).tensor("w").boxes}
    for i, j in product(range(5), range(7)):
        other = w.clone()
        other[i, j] += 1
        other[4, 6] += 0.5
        safetensors.torch.save_file({"w": other}, tmp_path / "b.safetensors")
        (found,) = diff_checkpoints(a, tmp_path / "b.safetensors")
        holder = [r for ((p, q), (m, n)), r in mesh_of.items() if p <= i < q and m <= j < n]
        assert (found.index, found.ranks) == ((i, j), (tuple(holder), (0,)))
    assert not list(diff_checkpoints(a, tmp_path / "b.safetensors", atol=1.5))
    assert list(diff_checkpoints(a, tmp_path / "b.safetensors", atol=1.4))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.uint64])
@pytest.mark.parametrize("tolerance", [(0.5, 0), (1.0, 0), (4.0, 0), (200.0, 0), (0, 0.3)])
def test_whole_numbers_are_compared_as_such(tmp_path, dtype, tolerance):
    """In float64, 2**53 and 2**53 + 1 are one number."""
    atol, rtol = tolerance
    info = torch.iinfo(dtype)
    some = (info.min, info.min + 1, 0, 5, 2**53, 2**53 + 1, info.max)
    pairs = list(product([number for number in some if number <= info.max], repeat=2))
    apart = [abs(x - y) > atol + rtol * abs(y) for x, y in pairs]
    for side, name in enumerate("ab"):
        tensors = {
            f"{at:03}": torch.tensor([pair[side]], dtype=dtype) for at, pair in enumerate(pairs)
        }
        safetensors.torch.save_file(tensors, tmp_path / name)
    found = diff_checkpoints(tmp_path / "a", tmp_path / "b", atol=atol, rtol=rtol)
    assert [int(d.name) for d in found] == [at for at, due in enumerate(apart) if due]
    assert 0 < sum(apart) < len(pairs)


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_what_is_no_tolerance(tmp_path, number):
    a = save(tmp_path / "a", w=(torch.ones(2), "[S0]"))
    for name in ("atol", "rtol"):
        with pytest.raises(CheckpointError, match=f"{name} {number!r} is not a tolerance"):
            list(diff_checkpoints(a, a, **{name: number}))
        refused = CliRunner().invoke(cli, ["diff", str(a), str(a), f"--{name}", str(number)])
        assert refused.exit_code == 2


def test_names_shapes_dtypes_nan_and_zero(tmp_path):
    nan = torch.tensor([float("nan"), 0.0])
    quiet = torch.tensor([0x7FC00001, -(2**31)], dtype=torch.int32).view(torch.float32)
    one = {"only": nan, "n": nan, "same": nan, "s": nan, "d": nan, "empty": torch.zeros(0, 3)}
    two = {**one, "n": quiet, "s": torch.zeros(3), "d": nan.double()}
    del two["only"]
    safetensors.torch.save_file({k: t.clone() for k, t in one.items()}, tmp_path / "a")
    safetensors.torch.save_file({k: t.clone() for k, t in two.items()}, tmp_path / "b")
    found = {d.name: d.problem for d in diff_checkpoints(tmp_path / "a", tmp_path / "b")}
    assert found == {
        "d": "is float32 in the first, float64 in the second",
        "n": "differs first at index [0]: nan of bits 0x7fc00000 in the first, nan of "
        "bits 0x7fc00001 in the second; 2 of 2 elements differ, by up to 0 (relative 0), "
        "NaN: 1 in the first, 1 in the second",
        "only": f"is only in {tmp_path / 'a'}",
        "s": "has shape [2] in the first, [3] in the second",
    }
    close = diff_checkpoints(tmp_path / "a", tmp_path / "b", atol=1e-9)
    assert [d.name for d in close] == ["only", "s"]


def test_tensors_larger_than_a_block(tmp_path):
    w = torch.zeros(3, 300_001)
    a = save(tmp_path / "a", w=(w, "[R,S01]"))
    w[2, 300_000] = 1
    b = save(tmp_path / "b", w=(w, "[S1,R]"))
    (found,) = diff_checkpoints(a, b)
    assert (found.index, found.ranks) == ((2, 300_000), ((5,), (2,)))


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ],
)
def test_every_bit_pattern_is_the_number_that_torch_says(dtype):
    kind = getattr(torch, dtype)
    raw = np.arange(2 ** (8 * kind.itemsize), dtype=f"u{kind.itemsize}").view(np.uint8)
    due = torch.from_numpy(raw.copy()).view(kind).float().numpy()
    np.testing.assert_array_equal(numbers(raw, dtype), due)


def test_numbers_of_two_dtypes_are_compared_as_near_as_asked(tmp_path):
    w = torch.tensor([[1.0, -2.0, 3.0], [0.1, float("nan"), float("-inf")]])
    i = torch.tensor([1, 2])
    safetensors.torch.save_file({"w": w, "i": i}, tmp_path / "a")
    safetensors.torch.save_file({"w": w.bfloat16(), "i": i.int()}, tmp_path / "b")
    exact = list(diff_checkpoints(tmp_path / "a", tmp_path / "b"))
    assert [d.problem for d in exact] == [
        "is int64 in the first, int32 in the second",
        "is float32 in the first, bfloat16 in the second",
    ]
    for a, b in (("a", "b"), ("b", "a")):
        close = diff_checkpoints(tmp_path / a, tmp_path / b, rtol=2**-8)
        assert [d.name for d in close] == ["i"]
    (_, near) = diff_checkpoints(tmp_path / "a", tmp_path / "b", rtol=1e-4)
    assert near.index == (1, 0)
    assert "0.10000000149011612 in the first, 0.10009765625 in the second" in near.problem


def test_progress_counts_every_byte_once(tmp_path):
    w = torch.arange(700_001.0)
    a = save(tmp_path / "a", w=(w, "[S01]"), v=(torch.zeros(5), "[R]"), only=(w, "[R]"))
    w[3] = -1
    b = save(tmp_path / "b", w=(w, "[S1]"), v=(torch.zeros(5), "[R]"))
    for run in (
        lambda told: list(diff_checkpoints(a, b, progress=told)),
        lambda told: verify_checkpoint(a, progress=told),
    ):
        seen: list[tuple[int, int]] = []
        run(lambda done, total, seen=seen: seen.append((done, total)))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert {total for _, total in seen} == {2 * w.nbytes + 20}
        assert seen[-1][0] == 2 * w.nbytes + 20


def test_copies_are_compared_element_by_element_however_they_lie(tmp_path):
    """A transposed copy is the same; what lies beyond the gaps of a stretched one counts too."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    gaps = np.zeros((2, 6), np.int32)
    gaps[:, ::2] = array
    other = gaps.copy()
    other[1, 4] = 99
    stored = {
        "rows": (array, None),
        "columns": (np.ascontiguousarray(array.T), (4, 8)),
        "gaps": (gaps, (24, 8)),
        "other": (other, (24, 8)),
    }
    boxes = {}
    for rank, (name, (data, strides)) in enumerate(stored.items()):
        (tmp_path / name).write_bytes(data.tobytes())
        boxes[name] = StoredBox(
            ((0, 2), (0, 3)), (), rank, LocalPath(tmp_path / name), 0, None, strides
        )
    tensor = StoredTensor("w", (2, 3), "int32", None, (), tuple(boxes.values()))
    with OpenFiles() as files:
        check_replicas(tensor, [boxes["rows"], boxes["columns"], boxes["gaps"]], files)
        with pytest.raises(CheckpointError, match=r"ranks 2 and 3 .* first at index \[1, 2\]"):
            check_replicas(tensor, [boxes["gaps"], boxes["other"]], files)


@pytest.mark.parametrize(("suffix", "kept"), [(".distcp", True), (".pt", False)])
def test_flat_parts_under_one_name_are_not_to_be_thrown_away(tmp_path, suffix, kept):
    """FSDP1's local optimizer states: what differs need not be wrong."""
    place = LocalPath(tmp_path)
    paths = [place / f"__{rank}_0{suffix}" for rank in range(2)]
    for rank, path in enumerate(paths):
        Path(path).write_bytes(bytes((rank,)) * 8)
    boxes = tuple(StoredBox(((0, 2),), (), rank, path, 0) for rank, path in enumerate(paths))
    tensor = StoredTensor("exp_avg", (2,), "float32", None, (), boxes)
    source = Catalog("example", place, {"exp_avg": tensor}, paths)
    (flaw,) = verify_checkpoint(source, every=True).flaws
    assert "claim different data for box [0:2]" in flaw
    assert ("FSDP1's local optimizer states are, keep all" in flaw) == kept


def test_how_much_differs(tmp_path):
    """Counts, the largest differences and NaN, over many pieces and boxes cut in two ways."""
    nan, inf = float("nan"), float("inf")
    w = torch.arange(700_000.0)
    other = w.clone()
    other[3], other[600_000], other[650_000], other[-1] = 3.5, 600_100, nan, inf
    w[7] = nan
    a = save(tmp_path / "a", w=(w, "[S01]"), same=(torch.ones(9), "[R]"))
    b = save(tmp_path / "b", w=(other, "[S1]"), same=(torch.ones(9), "[R]"))
    (found,) = diff_checkpoints(a, b)
    assert found.extent == DiffExtent(700_000, 5, inf, inf, (1, 1))
    assert found.problem.endswith(
        "; 5 of 700,000 elements differ, by up to inf (relative inf), NaN: 1 in the first, "
        "1 in the second"
    )
    other[-1], other[650_000] = w[-1], w[650_000]
    save_again = save(tmp_path / "c", w=(other, "[S1]"), same=(torch.ones(9), "[R]"))
    (found,) = diff_checkpoints(a, save_again)
    assert found.extent == DiffExtent(700_000, 3, 100.0, 0.5 / 3.5, (1, 0))
    (close,) = diff_checkpoints(a, save_again, atol=1)
    assert close.extent == DiffExtent(700_000, 2, 100.0, 100 / 600_100, (1, 0))


@pytest.mark.parametrize(
    ("x", "y", "extent"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), (1, 0.0, 0.0, (0, 0))),
        (torch.tensor([1.0]), torch.tensor([0.0]), (1, 1.0, math.inf, (0, 0))),
        (
            torch.tensor([-128, 5]).char(),
            torch.tensor([127, 5]).char(),
            (1, 255.0, 255 / 127, (0, 0)),
        ),
        (torch.tensor([2**53 + 1]), torch.tensor([2**53]), (1, 1.0, 2.0**-53, (0, 0))),
        (torch.tensor([True, True]), torch.tensor([True, False]), (1, 1.0, math.inf, (0, 0))),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), (1, 5.0, math.inf, (0, 0))),
        (HUGE, -HUGE, (1, 2e300, 2.0, (0, 0))),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), (1, math.inf, math.inf, (0, 0))),
        (
            torch.tensor([1.5, 2]).bfloat16(),
            torch.tensor([1.5, 4]).bfloat16(),
            (1, 2.0, 0.5, (0, 0)),
        ),
        (torch.tensor([math.nan]), torch.tensor([1.0]), (1, 0.0, 0.0, (1, 0))),
    ],
)
def test_how_much_differs_by_kind_of_number(tmp_path, x, y, extent):
    torch.save({"w": x}, tmp_path / "a.pt")
    torch.save({"w": y}, tmp_path / "b.pt")
    (found,) = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.extent == DiffExtent(len(x), *extent)
