"""What torch says of tensors: how each looks into its storage, for every dtype and kind of view."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.checksums import crc32
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.unpickler import Foreign, Record
from shardspec.checkpoint.torch_files.values import (
    TorchStorage,
    TorchTensor,
    UnreadTensor,
    row_major,
    sizes_of,
    tensor_place,
)
from shardspec.checkpoint.torch_files.writer import Name, Outside, PickledCall, pickled
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.test_dcp import DTYPES
from tests.checkpoint.zips import handmade


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pt"


def read(path):
    with storage_path(path).open() as file:
        found = read_torch_zip(file)
        return read_torch(found, found.pickle(file))


def values(path, tensor):
    """Return the elements of a tensor that was read, by its place alone."""
    with storage_path(path).open() as file:
        place = tensor_place(tensor, file, read_torch_zip(file))
        data = np.fromfile(path, np.uint8)
        if place.digest is not None:
            start, size = place.digest.start, place.digest.num_bytes
            assert crc32(data[start : start + size].tobytes()) == place.digest.crc32
        item = getattr(torch, tensor.dtype).itemsize
        due = [1] * len(tensor.shape)
        for dim in reversed(range(len(due) - 1)):
            due[dim] = due[dim + 1] * tensor.shape[dim + 1]
        strides = place.strides or tuple(step * item for step in due)
        shape, strides = (*tensor.shape, item), (*strides, 1)
        return np.lib.stride_tricks.as_strided(data[place.offset :], shape, strides).tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_tensors_of_every_dtype_are_read_as_torch_writes_them(path, dtype):
    raw = torch.arange(7 * 16, dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    torch.save([tensor, torch.nn.Parameter(tensor, requires_grad=False)], path)
    for found in read(path):
        assert f"torch.{found.dtype}" == str(dtype)
        assert found.shape == tensor.shape
        assert values(path, found) == tensor.view(torch.uint8).numpy().tobytes()


BASE = torch.arange(120.0).view(2, 3, 4, 5)
VIEWS = {
    "all": BASE,
    "turned": BASE.permute(3, 1, 0, 2),
    "rows": BASE[1, 1:],
    "columns": BASE[..., 2:4],
    "every other": BASE[:, ::2, 1::2, ::3],
    "repeated": BASE[0, 0, 0].expand(4, 5),
    "scalar": BASE[1, 2, 3, 4],
    "none": BASE[:0],
    "none at the end": BASE[2:],
    "one": BASE[1:, :1, :1, 3:4],
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_into_a_storage(path, view):
    tensor = VIEWS[view]
    torch.save({"base": BASE, "view": tensor}, path)
    found = read(path)["view"]
    assert (found.shape, found.strides) == (tuple(tensor.shape), tensor.stride())
    assert values(path, found) == tensor.contiguous().numpy().tobytes()
    with storage_path(path).open() as file:
        place = tensor_place(found, file, read_torch_zip(file))
    assert (place.strides is None) == tensor.is_contiguous()
    assert row_major(found.shape, found.strides) == tensor.is_contiguous()
    if view != "channels last":
        assert found.storage.key == "0"


def test_state_dicts_and_plain_values(path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = net.state_dict()
    torch.save(
        {
            "model": state,
            "optim": torch.optim.Adam(net.parameters()).state_dict(),
            "size": torch.Size((2, 3)),
            "bytes": b"\0\xff\n",
            "device": torch.device("cuda", 1),
            "parameter": net[0].weight,
        },
        path,
    )
    found = read(path)
    assert list(found["model"]) == list(state)
    assert all(isinstance(tensor, TorchTensor) for tensor in found["model"].values())
    assert found["model"]["1.num_batches_tracked"].shape == ()
    assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert (found["size"], found["bytes"]) == ((2, 3), b"\0\xff\n")
    assert isinstance(found["device"], Record)
    # A parameter and its entry in the state dict share their storage.
    assert found["parameter"].storage == found["model"]["0.weight"].storage


def test_attributes_of_tensors_are_left_out(path):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sequence_parallel = True  # type: ignore[attr-defined]  # as trainers do
    torch.save({"w": weight}, path)
    assert read(path)["w"].shape == (2,)


def test_states_of_schedulers_and_counts_are_read(path):
    adam = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(adam, [30, 60, 60])
    made = {
        name: defaultdict(kind, {"a": kind()})
        for name, kind in {"i": int, "f": float, "s": str, "l": list}.items()
    }
    torch.save({"state": scheduler.state_dict(), "none": Counter(), **made}, path)
    found = read(path)
    assert found["state"]["milestones"] == {30: 1, 60: 2}
    assert found["none"] == {}
    assert [found[name] for name in made] == [{"a": 0}, {"a": 0.0}, {"a": ""}, {"a": []}]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.ones(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "torch._utils._rebuild_qtensor",
        ),
        (lambda: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_objects_that_are_not_listed_are_not_made(path, make, kind):
    torch.save([make()], path)
    (found,) = read(path)
    assert isinstance(found, Foreign)
    assert type(found).path == kind


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "a view that conjugates or negates"),
        (lambda: torch.ones(2, dtype=torch.complex32), "a tensor of torch.complex32, which is not"),
        (lambda: torch.ones(2, device="meta"), "a tensor on the meta device, which has no data"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_cannot_be_read_in_place(path, make, why):
    torch.save([make(), torch.ones(3)], path)
    unread, found = read(path)
    assert isinstance(unread, UnreadTensor)
    assert unread.why.startswith(why)
    assert values(path, found) == torch.ones(3).numpy().tobytes()


# --- pickles that lie

FLOATS = Name("torch", "FloatStorage")
V2 = Name("torch._utils", "_rebuild_tensor_v2")
V3 = Name("torch._utils", "_rebuild_tensor_v3")
UNTYPED = Name("torch.storage", "UntypedStorage")


def storage(kind=FLOATS, key: object = "0", size: object = 6):
    return Outside(("storage", kind, key, "cpu", size))


def written(path, value, data=bytes(24)):
    path.write_bytes(handmade([(b"x/data.pkl", pickled(value)), (b"x/data/0", data)]))


def tensor(*args, function=V2):
    return PickledCall(function, (*args, False, PickledCall(Name("collections", "OrderedDict"))))


def test_the_handmade_one_is_good(path):
    written(path, tensor(storage(), 1, (2, 2), (2, 1)))
    found = read(path)
    assert found == TorchTensor("float32", (2, 2), (2, 1), 1, TorchStorage("0", "float32", 6))
    assert values(path, found) == bytes(16)
    v3 = PickledCall(
        V3, (*tensor(storage(UNTYPED, size=24), 2, (2,), (1,)).args, Name("torch", "int32"))
    )
    written(path, v3)
    assert read(path) == TorchTensor("int32", (2,), (1,), 2, TorchStorage("0", "uint8", 24))


@pytest.mark.parametrize(
    "value",
    [
        tensor(storage(), 0, (7,), (1,)),
        tensor(storage(), 1, (6,), (1,)),
        tensor(storage(), 0, (2, 2), (5, 1)),
        tensor(storage(), 7, (), ()),
        tensor(storage(), 6, (), ()),
        tensor(storage(), 2**62, (1,), (1,)),
        tensor(storage(), 0, (2,), (2**62,)),
    ],
)
def test_tensors_that_reach_past_their_storage(path, value):
    written(path, value)
    found = read(path)
    with pytest.raises(CheckpointError, match="reaches past its storage of 24 bytes; the file is"):
        values(path, found)


@pytest.mark.parametrize("size", [5, 7, 0])
def test_storages_of_other_sizes(path, size):
    written(path, tensor(storage(size=size), 0, (), ()))
    found = read(path)
    with pytest.raises(CheckpointError, match=f"has 24 bytes, but the pickle says {size} elements"):
        values(path, found)


@pytest.mark.parametrize(
    "value",
    [
        tensor(storage(key="../data.pkl"), 0, (), ()),
        tensor(storage(key="1"), 0, (), ()),
    ],
)
def test_storages_that_are_not_there(path, value):
    written(path, value)
    found = read(path)
    with pytest.raises(CheckpointError, match="has no record 'data/"):
        values(path, found)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(storage(), -1, (1,), (1,)), "no place in its storage"),
        (tensor(storage(), 0, (-1,), (1,)), "sizes are not whole numbers from 0"),
        (tensor(storage(), 0, (1,), (-1,)), "sizes are not whole numbers from 0"),
        (tensor(storage(), 0, (1.0,), (1,)), "sizes are not whole numbers from 0"),
        (tensor(storage(), 0, (True,), (1,)), "sizes are not whole numbers from 0"),
        (tensor(storage(), 0, (2**70,), (1,)), "sizes are not whole numbers from 0"),
        (tensor(storage(), 0, (1,) * 65, (1,) * 65), "or more than 64"),
        (tensor(storage(), 0, (1, 1), (1,)), "no stride for each dim"),
        (tensor(storage(), 0, "11", (1,)), "sizes are not whole numbers from 0"),
        (tensor(7, 0, (1,), (1,)), "a tensor has no storage"),
        (PickledCall(V2, (1, 2)), "with arguments that it does not take"),
        (
            PickledCall(V2, (*tensor(storage(), 0, (), ()).args, {}, {})),
            "with arguments that it does not take",
        ),
        (PickledCall(V3, (*tensor(storage(), 0, (), ()).args, 7)), "the name of a dtype"),
        (storage(key=7), "it refers to something that is not a storage"),
        (storage(size=-1), "it refers to something that is not a storage"),
        (Outside(("module", FLOATS)), "it refers to something that is not a storage"),
        (PickledCall(FLOATS, ()), "calls torch.FloatStorage, which is not a function"),
        (
            PickledCall(Name("_codecs", "encode"), ("x", "utf8")),
            "bytes are not text in latin1",
        ),
        (
            PickledCall(Name("_codecs", "encode"), ("\u0141", "latin1")),
            "with arguments that it does not",
        ),
        (PickledCall(Name("torch", "Size"), ((1, "x"),)), "sizes are not whole numbers from 0"),
    ],
)
def test_calls_that_make_no_sense(path, value, message):
    written(path, value)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "state", [b"}X\5\0\0\0shapeK\7s", b"N}X\5\0\0\0shapeK\7s\x86", b"(K\1K\2K\3K\4K\5t"]
)
def test_a_tensor_is_given_no_state(path, state):
    """What was checked cannot be changed afterwards."""
    data = pickled(tensor(storage(), 0, (2,), (1,)))[:-1] + state + b"b."
    path.write_bytes(handmade([(b"x/data.pkl", data), (b"x/data/0", bytes(24))]))
    with pytest.raises(CheckpointError, match="it is damaged, restore it"):
        read(path)


def test_sizes_are_tuples():
    assert sizes_of([2, 0]) == (2, 0)
