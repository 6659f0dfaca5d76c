"""What is written for torch.load is what torch itself would read from its own files."""

import zipfile
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils.serialization import config

from shardspec import DeviceMesh, Layout, ShardingSpec, merge
from shardspec.checkpoint.catalog import OutputTensor
from shardspec.checkpoint.formats.torch_file import torch_target
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.torch_files.dcp_target import dcp_target
from shardspec.errors import CheckpointError
from tests.checkpoint.writers.states import check_same, save, state


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return save(tmp_path_factory.mktemp("states") / "ckpt", state())


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_it(ckpt, tmp_path, mmap):
    merge(ckpt, tmp_path / "model.pt")
    check_same(torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap), state())


def test_its_zip_is_whole_and_aligned(ckpt, tmp_path):
    report = merge(ckpt, tmp_path / "model.pth")
    assert report.format == "torch"
    with zipfile.ZipFile(tmp_path / "model.pth") as archive:
        # Python compares every checksum.
        assert archive.testzip() is None
        data = (tmp_path / "model.pth").read_bytes()
        for info in archive.infolist():
            head = 30 + data[info.header_offset + 26] + 256 * data[info.header_offset + 27]
            head += data[info.header_offset + 28] + 256 * data[info.header_offset + 29]
            assert (info.header_offset + head) % 64 == 0


@contextmanager
def offsets_worked_out():
    """Tell torch to work out where records lie, and not to look."""
    config.load.calculate_storage_offsets = True
    try:
        yield
    finally:
        config.load.calculate_storage_offsets = False


def test_it_is_laid_out_as_torch_lays_it_out(tmp_path):
    tensors = {**state(), **{f"t.{rows}": torch.randn(rows, 13) for rows in range(0, 90, 7)}}
    merge(save(tmp_path / "ckpt", tensors), tmp_path / "model.pt")
    with offsets_worked_out():
        check_same(torch.load(tmp_path / "model.pt", mmap=True), tensors)


def test_what_depends_on_a_tensor_follows_it():
    tensors = [OutputTensor(str(n), str(n), (n % 3, 5), "int16") for n in range(7)]
    mesh = DeviceMesh(range(2), (2,))
    cut = {t.name: Layout(mesh, ShardingSpec(2, {0: (0,)}), t.shape, t.dtype) for t in tensors}
    files = dcp_target(mesh, tensors, cut, {"a": 1}).files
    for file in (*files, *torch_target("x", tensors, {}, {}).files):
        assert file.trailer is not None
        one_by_one = []
        crcs = [number * 7919 for number in range(len(file.extents))]
        parts = [(piece.offset, len(piece.made())) for piece in file.raw]
        # Each is made before those of later tensors are known.
        known: list[int] = []
        for number, (extent, late) in enumerate(
            zip(file.extents, file.trailer(known), strict=True)
        ):
            known.append(crcs[number])
            assert late.offset >= extent.offset + extent.num_bytes
            one_by_one.append((late.offset, late.made()))
            parts.append((extent.offset, extent.num_bytes))
            parts.append((late.offset, len(late.made())))
        parts.sort()
        assert [at for at, _ in parts] == [0, *(at + size for at, size in parts[:-1])]
        assert sum(parts[-1]) == file.num_bytes
        assert one_by_one == [(late.offset, late.made()) for late in file.trailer(crcs)]


def test_tied_tensors_are_written_once(tmp_path):
    tied = torch.arange(3000.0)
    torch.save({"a": tied, "b": tied.view(3000), "c": tied.clone()}, tmp_path / "in.pt")
    merge(tmp_path / "in.pt", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["a"].data_ptr() == found["b"].data_ptr() != found["c"].data_ptr()
    assert found["c"].equal(tied)
    assert (tmp_path / "out.pt").stat().st_size < 2 * 12_000 + 3_000
    # A cast keeps them tied; other names too.
    merge(tmp_path / "in.pt", tmp_path / "half.pt", dtype="f16", rename=[("^", "x.")])
    found = torch.load(tmp_path / "half.pt", weights_only=True)
    assert found["x.a"].data_ptr() == found["x.b"].data_ptr()
    assert found["x.a"].equal(tied.half())


def test_plain_values_go_along(tmp_path):
    values = {"step": 7, "lr": 1e-4, "name": "é", "flags": [True, None], "nested": {"a": (1, 2)}}
    torch.save({"w": torch.ones(2), **values}, tmp_path / "in.pt")
    report = merge(tmp_path / "in.pt", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found.pop("w").tolist() == [1, 1]
    kept = {name: found[name] for name in ("step", "lr", "name")}
    assert kept == {name: values[name] for name in ("step", "lr", "name")}
    assert report.left_out == ()
    # What is picked and renamed is picked and renamed for them too.
    rename = [("^", "x.")]
    report = merge(tmp_path / "in.pt", tmp_path / "some.pt", exclude=["[nf]*"], rename=rename)
    assert torch.load(tmp_path / "some.pt").keys() == {"x.w", "x.step", "x.lr"}
    assert {name.split(".")[0] for name in report.left_out} == {"name", "nested", "flags"}
    # safetensors has no room for them.
    assert "step" in merge(tmp_path / "in.pt", tmp_path / "out.safetensors").left_out


def test_sizes_past_32_bits():
    tensors = [OutputTensor("a", "a", (5 << 30,), "uint8"), OutputTensor("b", "b", (3,), "float32")]
    (file,) = torch_target("x.pt", tensors, {}, {}).files
    assert file.trailer is not None
    data = {piece.offset: piece.made() for piece in (*file.raw, *file.trailer([1, 2]))}
    assert file.num_bytes > 5 << 30
    # The whole file is holes but for what is known; zipfile reads its directory from a sparse one.
    assert file.extents[1].offset > 5 << 30
    assert max(offset + len(part) for offset, part in data.items()) == file.num_bytes


def test_a_sparse_file_past_32_bits_is_read(tmp_path):
    tensors = [OutputTensor("a", "a", (5 << 30,), "uint8"), OutputTensor("b", "b", (3,), "float32")]
    tensors.append(OutputTensor("c", "c", (1,), "int8"))
    (file,) = torch_target("x.pt", tensors, {}, {}).files
    assert file.trailer is not None
    path = tmp_path / "x.pt"
    with path.open("wb") as out:
        out.truncate(file.num_bytes)
        for piece in (*file.raw, *file.trailer([0, 0, 0])):
            out.seek(piece.offset)
            out.write(piece.made())
        out.seek(file.extents[1].offset)
        out.write(torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes())
        out.seek(file.extents[2].offset)
        out.write(b"\7")
    for how in (nullcontext, offsets_worked_out):
        with how():
            loaded = torch.load(path, weights_only=True, mmap=True)
        assert loaded["b"].tolist() == [1, 2, 3]
        assert loaded["c"].tolist() == [7]
        assert loaded["a"].shape == (5 << 30,)
    ours = open_checkpoint(path)
    assert ours.tensor("b").boxes[0].offset == file.extents[1].offset


def test_a_name_that_cannot_be_written():
    with pytest.raises(CheckpointError, match="UTF-8 cannot express; rename it"):
        torch_target("x.pt", [OutputTensor("\ud800", "a", (1,), "uint8")], {}, {})
