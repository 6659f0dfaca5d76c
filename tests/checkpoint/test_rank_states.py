"""Files of many ranks: reading most of them by another one tells what reading them alone does."""

import shutil
import struct
from math import prod
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardspec import merge
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.formats.rank_files import read_states
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.checksums import crc32
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.torch_files.values import tensor_place
from shardspec.errors import CheckpointError
from tests.dist.processes import run_ranks

LINE_BYTES = 46
"""Of a line of a zip's directory, without its name."""
WORLD = 6
SIZES = {"w": (6, 6), "v": (12, 2), "u": (4, 3), "b": (6,)}
PLACED = {
    "w": (Shard(0), Shard(1)),
    "v": (_StridedShard(0, split_factor=3), Shard(0)),
    "u": (Shard(0), Shard(1)),
    "b": (Replicate(), Shard(0)),
}


def save(rank, directory):
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("fsdp", "tp"))
    whole = {name: torch.arange(float(prod(size))).view(size) for name, size in SIZES.items()}
    state = {name: distribute_tensor(whole[name], mesh, PLACED[name]) for name in SIZES}
    # On a mesh of its own, which stands behind others in the pickle.
    state["s"] = distribute_tensor(torch.arange(4.0), mesh["fsdp"], (Shard(0),))
    plain = {"step": torch.tensor(7), "epoch": 3, "twice": state["w"]}
    for name, more in {
        "alike": plain,
        "told": {**plain, "rank": rank},
        "uneven": {**plain, "x": distribute_tensor(torch.arange(7.0), mesh, (Shard(0), Shard(0)))},
    }.items():
        (directory / name).mkdir(exist_ok=True)
        torch.save({"model": state, **more}, directory / name / f"rank-{rank}.pt")
    one = {"w": distribute_tensor(whole["w"], mesh, PLACED["w"])}
    sizes = {**one, "x": distribute_tensor(torch.arange(7.0), mesh, (Shard(0), Shard(0)))}
    # Two ranks hold it, but all say so.
    part = {"w": distribute_tensor(whole["w"], DeviceMesh("cpu", [0, 1]), (Shard(0),))}
    for name, some in {"one": one, "sizes": sizes, "part": part}.items():
        (directory / name).mkdir(exist_ok=True)
        torch.save(some, directory / name / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rank_states")
    run_ranks(WORLD, directory, save, directory)
    return directory


def paths_of(directory):
    return [directory / f"rank-{rank}.pt" for rank in range(WORLD)]


def told(state):
    """Return what a file says."""
    with storage_path(state.path).open() as file:
        tensors = {
            name: (tensor, tensor_place(tensor, file, state.archive))
            for name, tensor in state.tensors.items()
        }
    return tensors, state.extras


# Slices of a mesh are of several kinds, and so are parts of several sizes: 2, 2, 0, 1, 1, 1.
KINDS = {"alike": 3, "told": 3, "uneven": 6, "one": 1, "sizes": 3}


@pytest.mark.parametrize(("form", "kinds"), KINDS.items())
def test_all_ranks_are_read_as_they_are_alone(saved, form, kinds):
    read = read_states((LocalPath(path), rank) for rank, path in enumerate(paths_of(saved / form)))
    for rank, state in enumerate(read):
        (alone,) = read_states([(state.path, rank)])
        assert told(state) == told(alone)
        assert list(state.tensors) == list(alone.tensors)
    assert len({id(state.tensors) for state in read}) == kinds
    # Their directories are kept as often.
    assert len({id(state.archive.directory) for state in read}) == kinds


def test_what_ranks_tell_of_themselves_is_kept(saved):
    assert open_checkpoint(saved / "alike").extras == {"epoch": 3}
    by_rank = {f"rank {rank}": rank for rank in range(WORLD)}
    assert open_checkpoint(saved / "told").extras == {"epoch": 3, "rank": by_rank}


def outcome(path, *before):
    """Return what reading the file of rank 1 says, or how it is refused; and whether it shares."""
    try:
        *firsts, state = read_states((LocalPath(at), rank) for at, rank in (*before, (path, 1)))
        return told(state), any(state.tensors is first.tensors for first in firsts)
    except CheckpointError as error:
        return str(error), False


def pickle_at(data):
    """Return where the pickle and its CRC-32 in the directory are."""
    line = data.index(b"PK\1\2")
    assert data[line + LINE_BYTES :].split(b"/")[1].startswith(b"data.pkl")
    size = struct.unpack_from("<L", data, line + 24)[0]
    names = struct.unpack_from("<2H", data, 26)
    return 30 + sum(names), size, line + 16


@pytest.mark.parametrize(
    ("change", "every"),
    [
        (1, 11),
        pytest.param(1, 1, marks=pytest.mark.exhaustive),
        pytest.param(0x80, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_any_byte_of_a_pickle(saved, tmp_path, change, every):
    first, data = paths_of(saved / "one")[0], bytearray(paths_of(saved / "one")[1].read_bytes())
    start, size, noted = pickle_at(data)
    path = tmp_path / "rank-1.pt"
    alike, places = 0, range(start, start + size, every)
    for at in places:
        data[at] ^= change
        struct.pack_into("<L", data, noted, crc32(data[start : start + size]))
        path.write_bytes(data)
        data[at] ^= change
        due, _ = outcome(path)
        found, shared = outcome(path, (first, 0))
        assert found == due, at - start
        alike += shared
    # Names of process groups, what only torch reads of a mesh, and names of classes of objects that
    # are left out make no difference.
    assert 0 < alike < len(places) // 3


@pytest.mark.parametrize("change", [1, 0x80])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_any_byte_of_a_directory(saved, tmp_path, change, every):
    first, data = paths_of(saved / "one")[0], bytearray(paths_of(saved / "one")[1].read_bytes())
    path = tmp_path / "rank-1.pt"
    alike = 0
    for at in range(data.index(b"PK\1\2"), len(data), every):
        data[at] ^= change
        path.write_bytes(data)
        data[at] ^= change
        due, _ = outcome(path)
        found, _ = outcome(path, (first, 0))
        assert found == due, at
        alike += not isinstance(due, str)
    assert alike > 0


def test_copies_that_differ_are_compared_byte_by_byte(saved, tmp_path):
    ckpt = shutil.copytree(saved / "alike", tmp_path / "ckpt")
    source = open_checkpoint(ckpt)
    assert source.copies_agree("model.b")
    assert source.copies_agree("model.w")
    assert source.copies_agree("step")
    boxes = [box for box in source.tensor("model.b").boxes if box.box == ((2, 4),)]
    assert [box.rank for box in boxes] == [1, 4]
    spoil(boxes[1])
    source = open_checkpoint(ckpt)
    assert not source.copies_agree("model.b")
    assert source.copies_agree("model.w")
    with pytest.raises(CheckpointError) as caught:
        merge(ckpt, tmp_path / "out.safetensors")
    assert str(caught.value) == (
        f"tensor 'model.b': ranks 1 and 4 claim different data for box [2:4], first at index [2], "
        f"in {boxes[0].path} and {boxes[1].path}; keep the right one of the two"
    )
    assert not (tmp_path / "out.safetensors").exists()


def noted_at(box, data):
    """Return where in its file a box's digest is noted, and what it is of."""
    digest = box.digest
    assert digest is not None, "torch takes it"
    return data.index(struct.pack("<L", digest.crc32), data.index(b"PK\1\2")), digest


def spoil(box):
    """Change the first element of a box, and what is noted of it."""
    data = bytearray(Path(box.path).read_bytes())
    noted, digest = noted_at(box, data)
    data[box.offset] ^= 1
    value = crc32(data[digest.start : digest.start + digest.num_bytes])
    struct.pack_into("<L", data, noted, value)
    Path(box.path).write_bytes(data)


def test_without_digests_copies_are_not_known_to_agree(saved, tmp_path):
    ckpt = shutil.copytree(saved / "alike", tmp_path / "ckpt")
    boxes = open_checkpoint(ckpt).tensor("model.b").boxes
    for box in boxes:
        data = bytearray(Path(box.path).read_bytes())
        noted, _ = noted_at(box, data)
        struct.pack_into("<L", data, noted, 0)
        Path(box.path).write_bytes(data)
    source = open_checkpoint(ckpt)
    assert [box.digest for box in source.tensor("model.b").boxes] == [None] * WORLD
    assert not source.copies_agree("model.b")
    merge(ckpt, tmp_path / "out.safetensors")
    flip(boxes[4])
    assert "ranks 1 and 4 claim different data for box [2:4]" in refused(ckpt, tmp_path)


def flip(box):
    """Change the first element of a box."""
    data = bytearray(Path(box.path).read_bytes())
    data[box.offset] ^= 1
    Path(box.path).write_bytes(data)


def refused(ckpt, tmp_path, **options):
    out = tmp_path / "refused.safetensors"
    with pytest.raises(CheckpointError) as caught:
        merge(ckpt, out, **options)
    assert not out.exists()
    return str(caught.value)


def test_digests_are_not_trusted_when_they_are_not_to_be_verified(saved, tmp_path):
    ckpt = shutil.copytree(saved / "alike", tmp_path / "ckpt")
    flip(open_checkpoint(ckpt).tensor("model.b").boxes[4])
    # What is not read is not looked at; `verify` reads all.
    merge(ckpt, tmp_path / "out.safetensors")
    problem = "ranks 1 and 4 claim different data for box [2:4]"
    assert problem in refused(ckpt, tmp_path, verify=False)
    with pytest.raises(CheckpointError, match="CRC-32"):
        verify_checkpoint(ckpt)


def test_digests_of_storages_are_not_those_of_parts(tmp_path):
    base = torch.arange(6.0)
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    for rank, part in enumerate((base[:3], base[3:])):
        torch.save({"w": part, "all": base}, ckpt / f"rank-{rank}.pt")
    source = open_checkpoint(ckpt)
    assert source.copies_agree("all")
    assert not source.copies_agree("w")
    assert source.origin("w") != source.origin("all")
    assert "ranks 0 and 1 claim different data for box [0:3]" in refused(ckpt, tmp_path)


def test_sizes_are_compared_with_the_directory_before_anything_is_read(saved, tmp_path):
    ckpt = shutil.copytree(saved / "one", tmp_path / "ckpt")
    path = ckpt / "rank-4.pt"
    data = bytearray(path.read_bytes())
    line = data.index(b"rank-4/data/0", data.index(b"PK\1\2")) - LINE_BYTES
    assert struct.unpack_from("<2L", data, line + 20) == (24, 24)
    struct.pack_into("<2L", data, line + 20, 20, 20)
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(ckpt)
    assert str(caught.value) == (
        f"{path}: record data/0 has 20 bytes, but the pickle says 6 elements of float32; the file "
        "is damaged"
    )


def misname(path, record):
    """Have the own header of a record contradict the directory."""
    data = bytearray(path.read_bytes())
    data[data.index(record) + len(record) - 1] = ord("7")
    path.write_bytes(data)


def test_what_is_around_nothing_is_looked_at_too(saved, tmp_path):
    ckpt = shutil.copytree(saved / "sizes", tmp_path / "ckpt")
    misname(ckpt / "rank-2.pt", b"rank-2/data/2")
    source = open_checkpoint(ckpt)
    assert [box.rank for box in source.outline("x").boxes] == [0, 1, 3, 4, 5]
    assert "record b'rank-2/data/2' contradicts itself" in refused(ckpt, tmp_path)


def test_swapped_files_that_are_alike(saved, tmp_path):
    ckpt = shutil.copytree(saved / "alike", tmp_path / "ckpt")
    (ckpt / "rank-2.pt").rename(ckpt / "x")
    (ckpt / "rank-5.pt").rename(ckpt / "rank-2.pt")
    (ckpt / "x").rename(ckpt / "rank-5.pt")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(ckpt)
    assert str(caught.value) == (
        f"{ckpt / 'rank-2.pt'}: tensor 'model.b' was saved by rank 5, not by rank 2 as the name of "
        "the file says; restore the name of the file"
    )


def test_a_rank_beyond_the_mesh(saved):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(saved / "part")
    assert str(caught.value) == (
        f"{saved / 'part' / 'rank-2.pt'}: tensor 'w' was saved by ranks [0, 1], not by rank 2 as "
        "the name of the file says; restore the name of the file"
    )
