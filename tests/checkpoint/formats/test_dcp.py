"""Directories of torch.distributed.checkpoint: what torch saved, on gloo ranks and on one."""

import io
import os
import pickle
import random
import shutil
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.catalog import OpaqueValue
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.formats import format_of
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import (
    assert_merged_without_torch,
    assert_same,
    bits,
    read_whole,
    refused,
)
from tests.checkpoint.formats.torch_jobs import JOBS, Net, probe, run_jobs, save_alone

JOBS_BY_NAME = {cut.__name__: job for cut, job in JOBS.items()}
# Four ranks have all kinds of placements; eight have two of them at once.
WAYS = [
    pytest.param(way, marks=[pytest.mark.exhaustive] if ranks > 4 else [])
    for way, (ranks, _) in JOBS_BY_NAME.items()
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("jobs")
    run_jobs(directory, 4)
    return directory


@pytest.fixture
def place(saved, way):
    """What was saved with one way to cut."""
    if not (saved / way).exists():
        run_jobs(saved, JOBS_BY_NAME[way][0])
    return saved / way


def whole_of(place):
    """Return the tensors that torch gathered, flattened as it flattens, and those beside them."""
    full = torch.load(place / "full.pt")
    flat, _ = flatten_state_dict(full)
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    beside = {
        "list.0": torch.arange(3),
        "list.1.deep": torch.ones(2, 0, 4),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "cut": torch.arange(20.0)[3:11:2],
    }
    others = {name: value for name, value in flat.items() if name not in tensors}
    return tensors | beside, others


# --- what torch's own ranks have saved


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_merging_gives_the_bits_that_torch_gathers(place, tmp_path):
    due, _ = whole_of(place)
    assert {name.split(".")[0] for name in due} == {"model", "optim", "list", "turned", "cut"}
    assert len(due) == 29
    assert_same(read_whole(place / "ckpt"), due)
    merge(place / "ckpt", tmp_path / "out.safetensors")
    assert_same(load_file(tmp_path / "out.safetensors"), due)
    assert verify_checkpoint(place / "ckpt")
    assert list(diff_checkpoints(place / "ckpt", tmp_path / "out.safetensors")) == []


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_the_merged_model_says_the_same_in_one_process(place, way, tmp_path):
    rename = [("^model[.]", "")]
    merge(place / "ckpt", tmp_path / "model.pt", include=["model.*"], rename=rename)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    net = Net(JOBS_BY_NAME[way][1]).to(state["up.weight"].dtype)
    net.load_state_dict(state)
    logits = torch.load(place / "logits.pt")
    with torch.no_grad():
        found = net(probe(state["up.weight"].dtype))
    assert logits.shape == (8, 3)
    assert logits.abs().sum() > 0.1
    if way in ("fsdp", "hsdp"):
        assert found.equal(logits)
    else:
        # Ranks that hold columns add up partial sums, in another order.
        close = 1e-6 if found.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, logits, rtol=close, atol=close)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("way", "name", "placements", "ranks"),
    [
        ("fsdp", "model.up.weight", "(Shard(dim=0),)", {0, 1, 2, 3}),
        # Fewer rows than ranks: the last holds nothing.
        ("fsdp", "model.head.weight", "(Shard(dim=0),)", {0, 1, 2}),
        ("fsdp_tp", "model.up.bias", "(_StridedShard(dim=0, sf=2), Shard(dim=0))", {0, 1, 2, 3}),
        ("fsdp_tp", "model.down.weight", "(Shard(dim=0), Shard(dim=1))", {0, 1, 2, 3}),
        ("tp", "model.down.weight", "(Shard(dim=1),)", {0, 1, 2, 3}),
        ("hsdp", "model.up.weight", "(Replicate(), Shard(dim=0))", None),
        pytest.param(
            "hsdp_tp",
            "model.up.weight",
            "(Replicate(), _StridedShard(dim=0, sf=2), Shard(dim=0))",
            None,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_boxes_are_of_the_ranks_that_wrote_them(place, way, name, placements, ranks):
    shown = torch.load(place / "placements.pt")
    assert shown[name.removeprefix("model.")] == placements
    source = open_checkpoint(place / "ckpt")
    tensor = source.tensor(name)
    assert source.format == "torch distributed checkpoint"
    assert (source.mesh, tensor.spec, tensor.pending) == (None, None, ())
    for stored in tensor.boxes:
        assert stored.path.name == f"__{stored.rank}_0.distcp"
        assert stored.digest is not None
    if ranks is None:
        # Replicas are written once, by whichever rank torch chooses.
        assert len(tensor.boxes) == (4 if way == "hsdp_tp" else 2)
    else:
        assert {stored.rank for stored in tensor.boxes} == ranks
        assert len(tensor.boxes) == len(ranks)


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_tensor_is_carried_along(place):
    source = open_checkpoint(place / "ckpt")
    _, due = whole_of(place)
    assert source.extras == due | {
        "trainer.step": 2,
        "trainer.name": "ünï",
        "trainer.losses": [1.5, None, True],
        "trainer.rng": [b"\1\2", OpaqueValue("<set>")],
    }
    assert source.extras["optim.param_groups.0.betas"] == (0.9, 0.999)


@pytest.mark.dist
def test_nothing_imports_torch(saved, tmp_path):
    assert_merged_without_torch(saved / "fsdp_tp" / "ckpt", tmp_path / "out.safetensors")


@pytest.mark.dist
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_flipped_bit_in_any_box_is_found(saved, tmp_path, every):
    ckpt = tmp_path / "ckpt"
    shutil.copytree(saved / "fsdp_tp" / "ckpt", ckpt)
    source = open_checkpoint(ckpt)
    boxes = [(name, stored) for name in source.names for stored in source.tensor(name).boxes]
    assert len(boxes) == 61
    draw = random.Random(5)
    for name, stored in boxes[::every]:
        assert stored.digest is not None
        assert stored.digest.start <= stored.offset < stored.digest.start + stored.digest.num_bytes
        at = stored.digest.start + draw.randrange(stored.digest.num_bytes)
        with Flipped(stored.path, at, 1 << draw.randrange(8)):
            for act in (
                lambda: verify_checkpoint(ckpt),
                lambda: merge(ckpt, tmp_path / "out.safetensors"),
            ):
                with pytest.raises(CheckpointError) as caught:
                    act()
                message = str(caught.value)
                assert "CRC-32" in message
                assert repr(name) in message
                assert len(message.splitlines()) == 1
        assert os.listdir(tmp_path) == ["ckpt"]
    verify_checkpoint(ckpt)


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_an_outline_is_the_tensor_without_places(place):
    source = open_checkpoint(place / "ckpt")
    for name in source.names:
        outline, tensor = source.outline(name), source.tensor(name)
        held = [(box.box, box.addend, box.rank, box.path) for box in outline.boxes]
        assert held == [(box.box, box.addend, box.rank, box.path) for box in tensor.boxes]
        assert (outline.name, outline.shape, outline.dtype) == (name, tensor.shape, tensor.dtype)
        assert (outline.spec, outline.pending) == (None, ())


@pytest.mark.dist
def test_plans_look_into_no_chunk(saved, tmp_path):
    """What is wrong there is told when the chunk is read, and nothing has the final name."""
    ckpt, out = tmp_path / "ckpt", tmp_path / "out.safetensors"
    shutil.copytree(saved / "fsdp_tp" / "ckpt", ckpt)
    planned = merge(ckpt, out, dry_run=True)
    source = open_checkpoint(ckpt)
    name = source.names[-1]
    (stored, *_) = source.tensor(name).boxes
    assert stored.digest is not None
    # The local header of the record, which ends where the bytes begin.
    data = Path(stored.path).read_bytes()
    at = data.rindex(b"PK\3\4", 0, stored.digest.start)
    Path(stored.path).write_bytes(data[: at + 8] + b"\x08" + data[at + 9 :])
    again = merge(ckpt, out, dry_run=True)
    assert (again.num_bytes, again.read_bytes) == (planned.num_bytes, planned.read_bytes)
    for form in ("torch", "dcp", "huggingface"):
        assert merge(ckpt, tmp_path / "new", format=form, dry_run=True).tensors == planned.tensors
    for threads in (1, 2):
        with pytest.raises(CheckpointError) as caught:
            merge(ckpt, out, threads=threads)
        message = str(caught.value)
        assert message.startswith(f"{stored.path}: tensor {name!r}, box ")
        assert "contradicts itself" in message
        assert os.listdir(tmp_path) == ["ckpt"]
    with pytest.raises(CheckpointError, match="contradicts itself"):
        verify_checkpoint(ckpt)


@pytest.mark.dist
def test_threads_that_want_one_tensor_get_the_same(saved):
    for _ in range(8):
        source = open_checkpoint(saved / "fsdp_tp" / "ckpt")
        start = Barrier(4)

        def ask(_, source=source, start=start):
            start.wait()
            return [source.tensor(name) for name in source.names]

        with ThreadPoolExecutor(4) as pool:
            first, *others = pool.map(ask, range(4))
        assert all(found == first for found in others)


class Flipped:
    """While it lasts, a byte of a file is another."""

    def __init__(self, path, at, bits):
        self.path, self.at, self.bits = path, at, bits

    def __enter__(self):
        with open(self.path, "r+b") as file:
            file.seek(self.at)
            self.before = file.read(1)
            file.seek(self.at)
            file.write(bytes([self.before[0] ^ self.bits]))

    def __exit__(self, *_):
        with open(self.path, "r+b") as file:
            file.seek(self.at)
            file.write(self.before)


@pytest.mark.dist
def test_ranks_that_are_missing_or_swapped(saved, tmp_path):
    good = saved / "fsdp" / "ckpt"
    files = sorted(name for name in os.listdir(good) if name.endswith(".distcp"))
    assert len(files) == 4
    for name in files:
        ckpt = tmp_path / name
        shutil.copytree(good, ckpt)
        (ckpt / name).unlink()
        assert refused(ckpt).startswith(f"{ckpt / name}: is missing, but .metadata lists ")
    for first in files:
        for second in files:
            if first < second:
                ckpt = tmp_path / f"{first}-{second}"
                shutil.copytree(good, ckpt)
                shutil.copy(good / first, ckpt / second)
                shutil.copy(good / second, ckpt / first)
                assert refused(ckpt)


# --- one process


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float4_e2m1fn_x2,
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def test_every_dtype_to_the_bit(tmp_path):
    """Any bits: NaNs with payloads, negative zeros, subnormals."""
    raw = torch.randint(0, 256, (7 * 16,), dtype=torch.uint8, generator=torch.Generator())
    due = {str(dtype): raw.view(dtype) for dtype in DTYPES} | {"bool": raw > 128}
    due |= {f"{name} of none": tensor[:0] for name, tensor in due.items()}
    due |= {f"{name} scalar": tensor[3] for name, tensor in due.items() if tensor.numel()}
    save_alone(due, tmp_path / "ckpt")
    found = read_whole(tmp_path / "ckpt")
    assert found.keys() == due.keys()
    for name, tensor in due.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_an_unknown_dtype_hinders_only_its_tensor(tmp_path):
    save_alone({"z": torch.ones(2, dtype=torch.complex32), "a": torch.ones(2)}, tmp_path / "c")
    source = open_checkpoint(tmp_path / "c")
    assert source.tensor("a").dtype == "float32"
    assert source.names == ("a",)
    with pytest.raises(CheckpointError, match=r"'z'.*torch\.complex32"):
        merge(tmp_path / "c", tmp_path / "out")
    assert merge(tmp_path / "c", tmp_path / "out", include="a", dtype="bf16").tensors == 1
    reshard(tmp_path / "c", tmp_path / "o", device_mesh=DeviceMesh([0, 1]), exclude="z")
    for number, name in enumerate("de"):
        state = {"z": torch.full((2,), number, dtype=torch.complex32), "a": torch.ones(2)}
        save_alone(state, tmp_path / name)
    assert not list(diff_checkpoints(tmp_path / "d", tmp_path / "d"))
    assert [found.name for found in diff_checkpoints(tmp_path / "d", tmp_path / "e")] == ["z"]


def test_parameters_and_objects(tmp_path):
    state = {
        "p": torch.nn.Parameter(torch.arange(3.0)),
        "own": random.Random(3).getstate(),
        "fraction": [1 + 2j, torch.float32, torch.ones(2)],
        "argparse": Namespace(lr=1),
    }
    save_alone(state, tmp_path / "c")
    source = open_checkpoint(tmp_path / "c")
    assert source.names == ("fraction.2", "p")
    assert read_whole(tmp_path / "c")["p"].tolist() == [0, 1, 2]
    assert source.extras["own"] == random.Random(3).getstate()
    assert source.extras["fraction.0"] == OpaqueValue("(1+2j)")
    assert source.extras["fraction.1"] == OpaqueValue("torch.float32")
    unread = source.extras["argparse"]
    assert isinstance(unread, OpaqueValue)
    assert unread.text == "<argparse.Namespace>, not read and not run"


class MembersByName(pickle._Pickler):  # the one in C cannot be told how to save a member
    """Saves members of enums as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_metadata_of_the_first_pythons_311(tmp_path):
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
    save_alone(state, tmp_path / "c")
    place = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(place.read_bytes())
    buffer = io.BytesIO()
    MembersByName(buffer, 4).dump(metadata)
    assert b"getattr" in buffer.getvalue()
    place.write_bytes(buffer.getvalue())
    found = read_whole(tmp_path / "c")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    "name", ["torch.float32", "torch.distributed.checkpoint.metadata.Metadata"]
)
def test_nothing_else_is_taken_from_a_class(tmp_path, name):
    save_alone({"a": torch.ones(2)}, tmp_path / "c")
    module, _, inner = name.rpartition(".")
    program = f"\x80\x02cbuiltins\ngetattr\n(c{module}\n{inner}\nX\x08\0\0\0__init__tR."
    (tmp_path / "c" / ".metadata").write_bytes(program.encode("latin1"))
    with pytest.raises(CheckpointError, match=r"builtins\.getattr"):
        open_checkpoint(tmp_path / "c")


def test_without_crcs_of_torch(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save_alone({"a": torch.arange(5)}, tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(True)
    (stored,) = open_checkpoint(tmp_path / "c").tensor("a").boxes
    assert stored.digest is None
    assert_same(read_whole(tmp_path / "c"), {"a": torch.arange(5)})


@pytest.mark.parametrize(
    ("names", "due"),
    [
        ({".metadata", "__0_0.distcp"}, True),
        ({"__0_0.distcp", "__12_3.distcp"}, True),
        ({"__0.metadata"}, True),
        ({"model.safetensors"}, False),
        ({"0_0.distcp", "metadata"}, False),
    ],
)
def test_directories_are_told_by_names(names, due):
    found = format_of(names)
    assert (found is not None and found.name == "dcp") is due
