"""Directories of torch.distributed.checkpoint: what torch saved on gloo ranks, and spoiled ones."""

import os
import pickle
import random
import shutil
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from shardspec.checkpoint.diff import diff_checkpoints
from shardspec.checkpoint.formats.dcp import FORMAT, find_dcp, open_dcp
from shardspec.checkpoint.merge import merge
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.source import Described
from shardspec.checkpoint.verify import verify_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import (
    assert_merged_without_torch,
    assert_same,
    bits,
    read_whole,
    refused,
)
from tests.checkpoint.formats.torch_jobs import JOBS, Net, probe, run_jobs

WAYS = [cut.__name__ for cut in JOBS]
JOBS_BY_NAME = {cut.__name__: rows for cut, (_, rows) in JOBS.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("jobs")
    run_jobs(directory)
    return directory


@dataclass
class Small:
    """A checkpoint of one process, and what was saved."""

    path: Path
    tensors: dict[str, torch.Tensor]

    def metadata(self):
        with open(os.path.join(self.path, ".metadata"), "rb") as file:
            return pickle.load(file)

    def write(self, metadata):
        with open(os.path.join(self.path, ".metadata"), "wb") as file:
            pickle.dump(metadata, file)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "ckpt"
    tensors = {
        "a": torch.arange(6.0).view(2, 3).bfloat16(),
        "b": torch.tensor(7),
        "c": torch.arange(12.0).view(3, 4).t(),
        "e": torch.empty(0, 3),
    }
    save_alone({"m": tensors, "step": 5}, path)
    return Small(path, {f"m.{name}": tensor for name, tensor in tensors.items()})


@pytest.fixture
def small(original, tmp_path):
    shutil.copytree(original.path, tmp_path / "ckpt")
    return Small(tmp_path / "ckpt", original.tensors)


def save_alone(state, path):
    with pytest.warns(UserWarning, match="single process"):
        save(state, checkpoint_id=path)


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
def test_merging_gives_the_bits_that_torch_gathers(saved, way, tmp_path):
    place = saved / way
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
def test_the_merged_model_says_the_same_in_one_process(saved, way, tmp_path):
    place = saved / way
    rename = [("^model[.]", "")]
    merge(place / "ckpt", tmp_path / "model.pt", include=["model.*"], rename=rename)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    net = Net(JOBS_BY_NAME[way]).to(state["up.weight"].dtype)
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
        (
            "hsdp_tp",
            "model.up.weight",
            "(Replicate(), _StridedShard(dim=0, sf=2), Shard(dim=0))",
            None,
        ),
    ],
)
def test_boxes_are_of_the_ranks_that_wrote_them(saved, way, name, placements, ranks):
    shown = torch.load(saved / way / "placements.pt")
    assert shown[name.removeprefix("model.")] == placements
    source = open_checkpoint(saved / way / "ckpt")
    tensor = source.tensor(name)
    assert source.format == FORMAT
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
def test_what_is_no_tensor_is_carried_along(saved, way):
    source = open_dcp(saved / way / "ckpt")
    _, due = whole_of(saved / way)
    assert source.others == due | {
        "trainer.step": 2,
        "trainer.name": "ünï",
        "trainer.losses": [1.5, None, True],
        "trainer.rng": [Described("2 bytes"), Described("<set>")],
    }
    assert source.others["optim.param_groups.0.betas"] == (0.9, 0.999)
    assert source.paths["list.1.deep"] == ("list", 1, "deep")
    assert source.paths["optim.state.up.weight.exp_avg"] == (
        *("optim", "state", "up.weight", "exp_avg"),
    )
    assert set(source.paths) == {*source.names, *source.others}


@pytest.mark.dist
def test_nothing_imports_torch(saved, tmp_path):
    assert_merged_without_torch(saved / "fsdp_tp" / "ckpt", tmp_path / "out.safetensors")


@pytest.mark.dist
def test_a_flipped_bit_in_any_box_is_found(saved, tmp_path):
    ckpt = tmp_path / "ckpt"
    shutil.copytree(saved / "fsdp_tp" / "ckpt", ckpt)
    source = open_checkpoint(ckpt)
    boxes = [(name, stored) for name in source.names for stored in source.tensor(name).boxes]
    assert len(boxes) == 61
    draw = random.Random(5)
    for name, stored in boxes:
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
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8),
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


def test_an_unknown_dtype_hinders_only_its_tensor(tmp_path):
    save_alone({"z": torch.ones(2, dtype=torch.complex128), "a": torch.ones(2)}, tmp_path / "c")
    source = open_checkpoint(tmp_path / "c")
    assert source.tensor("a").dtype == "float32"
    with pytest.raises(CheckpointError) as caught:
        source.tensor("z")
    assert str(caught.value) == (
        f"{tmp_path / 'c'}: tensor 'z' is of dtype torch.complex128, which is not supported; cast "
        "it before saving, or leave it out"
    )


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
    assert source.others["own"] == random.Random(3).getstate()
    assert source.others["fraction.0"] == Described("(1+2j)")
    assert source.others["fraction.1"] == Described("torch.float32")
    unread = source.others["argparse"]
    assert isinstance(unread, Described)
    assert unread.text.startswith("an object that is not read: ")
    assert "names argparse.Namespace, which does not belong" in unread.text


def test_without_crcs_of_torch(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save_alone({"a": torch.arange(5)}, tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(True)
    (stored,) = open_checkpoint(tmp_path / "c").tensor("a").boxes
    assert stored.digest is None
    assert_same(read_whole(tmp_path / "c"), {"a": torch.arange(5)})


def test_the_small_one_is_good(small):
    assert_same(read_whole(small.path), small.tensors)
    small.write(small.metadata())
    assert_same(read_whole(small.path), small.tensors)


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
    assert find_dcp(frozenset(names)) is due


def test_unfinished_ones(small):
    os.remove(small.path / ".metadata")
    assert refused(small.path) == (
        f"{small.path}: has no .metadata, which is written last; the save did not finish"
    )
    (small.path / "__0.metadata").write_bytes(b"")
    assert refused(small.path) == (
        f"{small.path}: has no .metadata, each rank has one of its own; save with "
        "use_collectives=True"
    )


# --- the metadata cut, changed, and lying


def test_metadata_cut_at_every_byte(small):
    path = small.path / ".metadata"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert refused(small.path).startswith(f"{path}: ")


def read_or_none(path):
    """Return every tensor, or None if one clear line refuses them."""
    try:
        return read_whole(path)
    except CheckpointError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    return None


def test_any_byte_of_the_metadata_changed_does_no_harm(small):
    """Names and places have no digest; but a tensor is right, or refused, or has another name."""
    path = small.path / ".metadata"
    data = path.read_bytes()
    draw = random.Random(11)
    told = 0
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 + draw.randrange(255))]) + data[at + 1 :])
        found = read_or_none(small.path)
        if found is None:
            told += 1
            continue
        due = {bits(tensor) for tensor in small.tensors.values()}
        assert {bits(tensor) for tensor in found.values()} <= due
    assert told > len(data) / 2


def lie(change):
    """Return a case: what a change of torch's own metadata makes of it."""
    return pytest.param(change, id=change.__name__)


def of(metadata, name):
    return metadata.state_dict_metadata[name]


def index_of(metadata, name):
    (found,) = [index for index in metadata.storage_data if index.fqn == name]
    return found


def moved(metadata, name, **changes):
    index = index_of(metadata, name)
    metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)


def chunk_outside(metadata):
    of(metadata, "m.a").size = torch.Size((2, 2))
    return ".metadata: tensor 'm.a': its chunk [0:2, 0:3] lies outside of shape [2, 2]; the"


def chunk_of_other_dims(metadata):
    of(metadata, "m.a").size = torch.Size((6,))
    return ".metadata: tensor 'm.a': its chunk [0:2, 0:3] lies outside of shape [6]; the"


def hole(metadata):
    of(metadata, "m.a").size = torch.Size((3, 3))
    return "tensor 'm.a' of shape [3, 3]: no file holds its part [2:3, 0:3]; restore"


def chunk_twice(metadata):
    chunks = of(metadata, "m.a").chunks
    chunks.append(replace(chunks[0], sizes=torch.Size((1, 3))))
    return "box [0:1, 0:3]: is [2, 3] of bfloat16 there, but .metadata says [1, 3] of bfloat16"


def no_chunks(metadata):
    of(metadata, "m.a").chunks.clear()
    return "tensor 'm.a' of shape [2, 3]: no file holds its part [0:2, 0:3]; restore"


def chunk_without_place(metadata):
    del metadata.storage_data[index_of(metadata, "m.a")]
    return ".metadata: tensor 'm.a': no file holds its chunk [0:2, 0:3]; the metadata contradicts"


def other_without_place(metadata):
    del metadata.storage_data[index_of(metadata, "step")]
    return ".metadata: says of no file that it holds entry 'step'"


def negative_offset(metadata):
    moved(metadata, "m.a", offset=-1)
    return ".metadata: lists a place that is none; it is damaged"


def huge_offset(metadata):
    moved(metadata, "m.a", offset=2**62)
    return "/__0_0.distcp: has "


def past_the_end(metadata):
    last = max(metadata.storage_data.values(), key=lambda info: info.offset)
    last.length += 1
    return "; it was cut short, restore it"


def shared_bytes(metadata):
    moved(metadata, "m.a", offset=metadata.storage_data[index_of(metadata, "m.b")].offset + 3)
    return ".metadata: two entries in __0_0.distcp share byte "


def shorter(metadata):
    moved(metadata, "m.a", length=metadata.storage_data[index_of(metadata, "m.a")].length - 1)
    return "tensor 'm.a', box [0:2, 0:3]: does not end as torch.save ends a file"


def swapped_items(metadata):
    a, c = index_of(metadata, "m.a"), index_of(metadata, "m.c")
    data = metadata.storage_data
    data[a], data[c] = data[c], data[a]
    return "tensor 'm.a', box [0:2, 0:3]: is [4, 3] of float32 there, but .metadata says [2, 3] of"


def tensor_for_object(metadata):
    a, step = index_of(metadata, "m.a"), index_of(metadata, "step")
    data = metadata.storage_data
    data[a], data[step] = data[step], data[a]
    return "tensor 'm.a', box [0:2, 0:3]: holds a int, not a tensor; the file is damaged or from"


def other_dtype(metadata):
    of(metadata, "m.a").properties.dtype = torch.float16
    return "is [2, 3] of bfloat16 there, but .metadata says [2, 3] of float16"


def compressed(metadata):
    moved(metadata, "m.a", transform_descriptors=["zstd", "x" * 999])
    return ".metadata: entry 'm.a' was transformed when it was written (zstd, xxx"


def parent_folder(metadata):
    moved(metadata, "m.a", relative_path="../__0_0.distcp")
    return ".metadata: file name '../__0_0.distcp' is not a plain name"


def absolute_path(metadata):
    moved(metadata, "m.a", relative_path="/etc/passwd")
    return ".metadata: file name '/etc/passwd' is not a plain name"


def nul_in_a_name(metadata):
    moved(metadata, "m.a", relative_path="a\0b")
    return "is not a plain name"


def long_file_name(metadata):
    moved(metadata, "m.a", relative_path="a" * 5000)
    return ": is missing, but .metadata lists 1 entries"


def half_a_character(metadata):
    moved(metadata, "m.a", relative_path="\ud800")
    return ".metadata: lists a place that is none; it is damaged"


def half_a_character_as_name(metadata):
    metadata.state_dict_metadata["\ud800"] = of(metadata, "step")
    return ".metadata: has an entry without a name or a kind; it is damaged"


def number_as_name(metadata):
    metadata.state_dict_metadata[3] = of(metadata, "step")
    return ".metadata: has an entry without a name or a kind; it is damaged"


def own_class(metadata):
    metadata.planner_data = Small(Path(), {})
    return ".metadata: the metadata names tests.checkpoint.formats.test_dcp.Small, which does not"


def own_function(metadata):
    metadata.storage_meta = os.getcwd
    return ".metadata: the metadata names posix.getcwd, which does not belong in a checkpoint"


def no_list(metadata):
    metadata.storage_data = None
    return ".metadata: lacks its list of entries or of files; it is damaged"


def negative_size(metadata):
    metadata.state_dict_metadata["m.a"].size = [-2, 3]
    return ".metadata: tensor 'm.a': sizes are whole numbers from 0"


LIES = (
    *(chunk_outside, chunk_of_other_dims, hole, chunk_twice, no_chunks, chunk_without_place),
    *(other_without_place, negative_offset, huge_offset, past_the_end, shared_bytes, shorter),
    *(swapped_items, tensor_for_object, other_dtype, compressed, parent_folder, absolute_path),
    *(nul_in_a_name, long_file_name, half_a_character, half_a_character_as_name, number_as_name),
    *(own_class, own_function, no_list, negative_size),
)


@pytest.mark.parametrize("change", [lie(change) for change in LIES])
def test_lies_of_the_metadata(small, change):
    metadata = small.metadata()
    due = change(metadata)
    small.write(metadata)
    assert due in refused(small.path)


def test_what_is_no_metadata(small):
    things: list[object] = [7, [], {"state_dict_metadata": {}}, torch.Size((1,)), Metadata]
    for thing in things:
        small.write(thing)
        message = refused(small.path)
        assert (
            message == f"{small.path}/.metadata: is no metadata of a torch distributed checkpoint"
        )


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_files_that_are_none(small, tmp_path, kind):
    path = small.path / "__0_0.distcp"
    path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    message = refused(small.path)
    assert "outside the checkpoint" in message if kind == "link" else "not a regular" in message


# --- the files cut and changed


def test_files_cut_at_every_so_many_bytes(small):
    path = small.path / "__0_0.distcp"
    data = path.read_bytes()
    for size in range(0, len(data), 37):
        path.write_bytes(data[:size])
        assert refused(small.path).startswith(f"{path}: has {size} bytes, but .metadata lists")


def test_any_byte_of_a_file_changed_is_told_or_does_not_matter(small):
    path = small.path / "__0_0.distcp"
    data = path.read_bytes()
    draw = random.Random(13)
    told = 0
    places = draw.sample(range(len(data)), 1500)
    for at in places:
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 + draw.randrange(255))]) + data[at + 1 :])
        found = read_or_none(small.path)
        if found is None:
            told += 1
            continue
        assert_same(found, small.tensors)
    # Padding, time stamps and records that say nothing of tensors make up the rest.
    assert 200 < told < 1400
