"""Merging: what comes out, over every layout; the file; progress, cleaning up, memory."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from shardspec import DeviceMesh, DTensor, merge, reshard, save_sharded
from shardspec.errors import CheckpointError, OutputExistsError
from tests.checkpoint.handmade import all_specs, handmade, sample
from tests.faults.forks import Fork

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]


@pytest.mark.parametrize("mesh_shape", [(2, 3), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("replicas", [False, True])
def test_every_layout_of_every_small_tensor_comes_out_whole(tmp_path, mesh_shape, replicas):
    rng = np.random.default_rng(0)
    tensors = {}
    for shape in [(), (1,), (7,), (13,), (5, 7), (8, 3), (1, 13), (2, 7, 3), (5, 1, 4), (3, 0)]:
        array = rng.integers(-(2**31), 2**31 - 1, shape, np.int32)
        for spec in all_specs(len(shape), len(mesh_shape)):
            tensors[f"{shape} {spec}"] = (str(spec), np.asarray(array))
    ckpt = handmade(tensors, mesh_shape, replicas=replicas).write(tmp_path / "ckpt")
    report = merge(ckpt, tmp_path / "out.safetensors")
    assert report.tensors == len(tensors) > 75
    merged = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    assert merged.keys() == tensors.keys()
    for name, (_, array) in tensors.items():
        assert merged[name].shape == array.shape
        np.testing.assert_array_equal(merged[name], array)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((5, 300_007), "[R,S01]"),  # rows of 1.2 MB: runs within a row
        ((3000, 701), "[R,S01]"),  # several blocks, columns of uneven width
        ((3000, 701), "[S1,S0]"),
        ((7, 5, 40_000), "[R,S01,R]"),  # cut in the middle
        ((2, 3, 300_000), "[S0,R,S1]"),
        ((1_500_000,), "[S10]"),
        ((3, 200_000, 3), "[R,R,S1]"),  # three bytes wide, a row larger than a block
    ],
)
def test_tensors_larger_than_the_buffers(tmp_path, shape, spec):
    dtype = np.uint8 if shape[-1] == 3 else np.int32
    array = np.random.default_rng(1).integers(0, 200, shape, dtype)
    ckpt = handmade({"big": (spec, array), "x": ("[R]", np.arange(3))}).write(tmp_path / "ckpt")
    merge(ckpt, tmp_path / "out.safetensors")
    merged = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    np.testing.assert_array_equal(merged["big"], array)


def every_bit_pattern(dtype):
    """A 35x23 tensor whose bytes are random: NaN payloads, -0, subnormals, whatever there is."""
    count = 35 * 23
    if dtype == "bool":
        return torch.arange(count).view(35, 23) % 3 == 0
    size = getattr(torch, dtype).itemsize
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, dtype)).view(35, 23)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_every_dtype_keeps_its_bits_and_the_file_is_the_one_safetensors_writes(tmp_path):
    mesh = DeviceMesh([4, 1, 0, 5, 3, 2], (2, 3))
    whole = {dtype: every_bit_pattern(dtype) for dtype in DTYPES}
    specs: list[str] = ["[S0,R]", "[R,S10]", "[S1,S0]", "[R,R]", "[S01,R]"]
    state = {
        dtype: DTensor(tensor, mesh, specs[place % len(specs)])
        for place, (dtype, tensor) in enumerate(whole.items())
    }
    save_sharded(state, tmp_path / "ckpt")
    merge(tmp_path / "ckpt", tmp_path / "out.safetensors")
    merged = safetensors.torch.load_file(tmp_path / "out.safetensors")
    for dtype, tensor in whole.items():
        assert merged[dtype].dtype == tensor.dtype
        assert torch.equal(bits(merged[dtype]), bits(tensor)), dtype
    oracle = tmp_path / "oracle.safetensors"
    safetensors.torch.save_file(whole, oracle, metadata={"format": "pt"})
    assert (tmp_path / "out.safetensors").read_bytes() == oracle.read_bytes()


def test_names_of_any_characters_and_no_tensors_at_all(tmp_path):
    names = ["", " ", "a\0b", 'quote"\\', "\x1b[31m", "é\u2028\U0001f600", "a/../b", "[x]", "\n"]
    tensors = {name: ("[S0]", np.arange(7, dtype=np.int32) + i) for i, name in enumerate(names)}
    ckpt = handmade(tensors).write(tmp_path / "ckpt")
    merge(ckpt, tmp_path / "out.safetensors")
    merged = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    assert {name: int(array[0]) for name, array in merged.items()} == {
        name: i for i, name in enumerate(names)
    }
    empty = handmade({}).write(tmp_path / "empty")
    assert merge(empty, tmp_path / "empty.safetensors").tensors == 0
    assert safetensors.numpy.load_file(tmp_path / "empty.safetensors") == {}


@pytest.mark.parametrize(
    ("op", "most", "last"), [("", 11, 15), ("min", 1, 3), ("max", 7, 7), ("prod", 21, 105)]
)
def test_pending_reductions_are_finished(tmp_path, op, most, last):
    addends = {(i,): np.full((4, 5), v, np.int32) for i, v in enumerate([3, 7, 1])}
    addends[2,][3, 4] = 5
    ckpt = handmade({"p": (f"[S0,R|P{op}1]", addends)}).write(tmp_path / "ckpt")
    merge(ckpt, tmp_path / "out.safetensors")
    merged = safetensors.numpy.load_file(tmp_path / "out.safetensors")["p"]
    expected = np.full((4, 5), most, np.int32)
    expected[3, 4] = last
    np.testing.assert_array_equal(merged, expected)


def test_a_sum_over_one_axis_and_a_mean_over_another(tmp_path):
    values = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32)
    # The order of the indices is that of the spec: the sum over axis 1, then the mean over 0.
    addends = {(j, i): values[i, j] for i in range(2) for j in range(3)}
    ckpt = handmade({"p": ("[R,R|P1,Pavg0]", addends)}).write(tmp_path / "ckpt")
    merge(ckpt, tmp_path / "out.safetensors")
    merged = safetensors.numpy.load_file(tmp_path / "out.safetensors")["p"]
    np.testing.assert_allclose(merged, values.sum(1).mean(0), rtol=1e-6)


def test_a_pending_sum_larger_than_the_buffers(tmp_path):
    values = np.random.default_rng(0).integers(-1000, 1000, (2, 1000, 700), np.int64)
    addends = {(i,): values[i] for i in range(2)}
    ckpt = handmade({"p": ("[R,S1|P0]", addends)}).write(tmp_path / "ckpt")
    merge(ckpt, tmp_path / "out.safetensors")
    merged = safetensors.numpy.load_file(tmp_path / "out.safetensors")["p"]
    np.testing.assert_array_equal(merged, values.sum(0))


def test_progress_counts_every_byte_once(tmp_path):
    calls = []
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    report = merge(ckpt, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert report.path == tmp_path / "out"
    assert report.num_bytes == (tmp_path / "out").stat().st_size
    assert {total for _, total in calls} == {report.num_bytes}
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == report.num_bytes


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_an_interrupt_leaves_the_old_output_and_no_other_file(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    out = tmp_path / "out"
    out.write_text("precious")

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(ckpt, out, overwrite=True, progress=interrupt)
    assert out.read_text() == "precious"
    assert names_in(tmp_path) == ["ckpt", "out"]


def test_an_existing_output_is_kept_unless_it_is_to_be_overwritten(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    out = tmp_path / "out"
    out.write_text("precious")
    with pytest.raises(OutputExistsError, match=r"out: exists; .*with overwrite=True"):
        merge(ckpt, out)
    assert out.read_text() == "precious"
    merge(ckpt, out, overwrite=True)
    assert safetensors.numpy.load_file(out).keys() == {"w", "b"}
    assert names_in(tmp_path) == ["ckpt", "out"]


def test_an_output_that_appears_meanwhile_is_kept(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    out = tmp_path / "out"
    with pytest.raises(OutputExistsError, match="exists"):
        merge(ckpt, out, progress=lambda *_: out.write_text("the other's"))
    assert out.read_text() == "the other's"
    assert names_in(tmp_path) == ["ckpt", "out"]


@pytest.fixture
def closed():
    """A checkpoint in a folder that nobody may write, and nobody's rights for a test by root."""
    with tempfile.TemporaryDirectory() as made:
        ckpt = handmade(sample()).write(Path(made) / "ckpt")
        Path(made, "old").touch()
        Path(made).chmod(0o555)
        user = os.geteuid()
        if not user:
            os.seteuid(65534)
        yield ckpt
        os.seteuid(user)
        Path(made).chmod(0o755)


def test_a_dry_run_says_that_nothing_can_be_written_there(closed):
    for name in ("new", "old"):
        with pytest.raises(CheckpointError, match=f"{name}: .* its directory .* is not writable"):
            merge(closed, closed.parent / name, dry_run=True, overwrite=True)


def test_a_link_as_output_stays_a_link(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    out, real = tmp_path / "out", tmp_path / "real"
    out.symlink_to(real)
    merge(ckpt, out)
    assert out.is_symlink()
    assert safetensors.numpy.load_file(real).keys() == {"w", "b"}


def test_a_part_of_the_checkpoint_is_never_written_over(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    link = tmp_path / "link"
    os.link(ckpt / "rank3.safetensors", link)
    before = {path.name: path.read_bytes() for path in ckpt.iterdir()}
    for out in (ckpt / "rank3.safetensors", ckpt / "sharding_info.json", link):
        with pytest.raises(CheckpointError, match="of the checkpoint itself; choose another name"):
            merge(ckpt, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in ckpt.iterdir()} == before


def test_outputs_that_are_no_files(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    os.mkfifo(tmp_path / "pipe")
    for out, problem in [
        (tmp_path, "is a directory; name a file"),
        (tmp_path / "pipe", "is not a regular file"),
        (tmp_path / "no" / "such" / "out", "its directory .* does not exist"),
        (tmp_path / "pipe" / "out", "cannot be written: Not a directory"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long"),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            merge(ckpt, out, overwrite=True)
    assert names_in(tmp_path) == ["ckpt", "pipe"]


def run(code, *arguments):
    # A process starts with its parent's peak of memory; that of the shell between them is small.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", code]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("spec", ["[S0,R]", "[R,S0]"])
def test_a_file_that_cannot_grow(tmp_path, when, spec):
    # The limit on the size of a file is the full disk that needs no disk of its own.
    array = np.zeros((600, 1000), np.int32)
    ckpt = handmade({"w": (spec, array)}).write(tmp_path / "ckpt")
    (tmp_path / "out").write_text("precious")

    def full(*_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    def act():
        if when == "before":
            full()
        merge(ckpt, tmp_path / "out", overwrite=True, progress=full)

    end = Fork(act).end()
    assert end.startswith("Error: ")
    assert "File too large" in end
    assert str(tmp_path / "out") in end
    assert len(end.splitlines()) == 1
    assert (tmp_path / "out").read_text() == "precious"
    assert names_in(tmp_path) == ["ckpt", "out"]


MEMORY = """
import resource, sys
from shardspec.checkpoint.convert.output import merge
from shardspec.checkpoint.convert.output import reshard
merge(sys.argv[1], sys.argv[2])
assert "torch" not in sys.modules and "networkx" not in sys.modules
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.parametrize("spec", ["[S0,R]", "[R,S0]", "[R,R|P0]"])
def test_memory_does_not_grow_with_the_tensor_and_torch_stays_out(tmp_path, spec):
    array = np.zeros((4096, 4096), np.int32)
    assert array.nbytes == 64 << 20
    value = {(0,): array, (1,): array} if "P" in spec else array
    ckpt = handmade({"w": (spec, value)}, (2,)).write(tmp_path / "ckpt")
    ended = run(MEMORY, ckpt, tmp_path / "out")
    assert ended.stderr == ""
    assert 10 < int(ended.stdout) < 64  # MiB, the interpreter and numpy included
    with safetensors.safe_open(tmp_path / "out", "np") as merged:
        assert merged.get_slice("w").get_shape() == [4096, 4096]


LOSSY = {
    "w": torch.tensor([70000.0, 1.0, 1e-9, 0.0, float("inf"), float("nan"), -1e-12]),
    "v": torch.tensor([-1e6, 2.0]),
    "n": torch.tensor([10**9]),
}


@pytest.mark.parametrize(
    ("dtype", "losses"),
    [
        ("fp16", {"overflows": 2, "underflows": 2, "nans": 0}),
        ("bf16", {"overflows": 0, "underflows": 0, "nans": 0}),
        (None, None),
    ],
)
def test_numbers_that_a_cast_does_not_keep_are_counted_or_refused(tmp_path, dtype, losses):
    save_sharded(LOSSY, tmp_path / "ckpt")
    for threads, limit in ((1, None), (2, 28)):
        out = tmp_path / f"out-{threads}"
        report = merge(tmp_path / "ckpt", out, dtype=dtype, threads=threads, max_shard_bytes=limit)
        assert report.to_json()["cast"] == losses
    dry = merge(tmp_path / "ckpt", tmp_path / "dry", dtype=dtype, dry_run=True)
    assert dry.to_json()["cast"] is None
    if losses and any(losses.values()):
        with pytest.raises(CheckpointError, match=r"tensor '[vw]': .* values: 1 (too|made)"):
            merge(tmp_path / "ckpt", tmp_path / "strict", dtype=dtype, strict_cast=True)
        assert not (tmp_path / "strict").exists()
    else:
        merge(tmp_path / "ckpt", tmp_path / "strict", dtype=dtype, strict_cast=True)


def written_in_parts(directory, metadata):
    """Write a safetensors file for each of some metadata, with one tensor in it."""
    directory.mkdir()
    for number, said in enumerate(metadata, 1):
        path = directory / f"model-{number:05d}-of-{len(metadata):05d}.safetensors"
        safetensors.torch.save_file({f"w{number}": torch.arange(4.0) + number}, path, said)
    return directory


def metadata_of(path):
    with safetensors.safe_open(path, "np") as file:
        return file.metadata()


def test_what_files_say_besides_tensors_goes_along(tmp_path):
    quantized = {"format": "pt", "w1": '{"_type": "Int8Tensor"}', "shared": "yes"}
    parts = [quantized, {"format": "np", "shared": "yes"}, None]
    source = written_in_parts(tmp_path / "in", parts)
    due = {"format": "pt", "w1": '{"_type": "Int8Tensor"}', "shared": "yes"}
    assert merge(source, tmp_path / "out.safetensors").left_out == ()
    assert metadata_of(tmp_path / "out.safetensors") == due
    merge(source, tmp_path / "hub", max_shard_bytes=16)
    for path in (tmp_path / "hub").glob("*.safetensors"):
        assert metadata_of(path) == due
    # And from there on.
    merge(tmp_path / "hub", tmp_path / "again.safetensors")
    assert metadata_of(tmp_path / "again.safetensors") == due
    report = merge(source, tmp_path / "none.safetensors", metadata=False)
    assert report.left_out == ("__metadata__",)
    assert metadata_of(tmp_path / "none.safetensors") == {"format": "pt"}
    # By way of our own format, twice.
    mesh = DeviceMesh(range(2), (2,))
    assert reshard(source, tmp_path / "own", device_mesh=mesh).left_out == ()
    reshard(tmp_path / "own", tmp_path / "cut", device_mesh=mesh, rules={"w1": "[S0]"})
    merge(tmp_path / "cut", tmp_path / "back.safetensors")
    assert metadata_of(tmp_path / "back.safetensors") == due
    info = json.loads((tmp_path / "cut" / "sharding_info.json").read_text("utf-8"))
    assert info["file_metadata"] == {key: due[key] for key in ("w1", "shared")}
    info["file_metadata"]["w1"] = 7
    (tmp_path / "cut" / "sharding_info.json").write_text(json.dumps(info))
    with pytest.raises(CheckpointError, match=r"file_metadata\['w1'\]"):
        merge(tmp_path / "cut", tmp_path / "never.safetensors")
    # Other formats have no room for it.
    assert merge(source, tmp_path / "out.pt").left_out == ("__metadata__",)


def test_files_that_contradict_each_other(tmp_path):
    source = written_in_parts(tmp_path / "in", [{"kind": "a"}, {"kind": "a"}, {"kind": "b"}])
    with pytest.raises(
        CheckpointError,
        match=r"model-00001-of-00003.safetensors and model-00003-of-00003.safetensors have "
        r"different metadata under 'kind'.*metadata=False",
    ):
        merge(source, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    merge(source, tmp_path / "out.pt")
    report = reshard(source, tmp_path / "own", device_mesh=DeviceMesh((0,), (1,)))
    assert report.left_out == ("__metadata__",)
    merge(source, tmp_path / "out.safetensors", metadata=False)
    assert metadata_of(tmp_path / "out.safetensors") == {"format": "pt"}
