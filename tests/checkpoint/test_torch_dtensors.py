"""DTensors in every form in which a version of torch has kept their meshes and placements."""

import struct
from math import prod

import pytest

from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.values import TorchTensor
from shardspec.checkpoint.torch_files.writer import Made, Name, Outside, PickledCall, pickled
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.errors import CheckpointError
from shardspec.layout.placements import spec_of_placements
from tests.checkpoint.zips import handmade

NEW = "torch.distributed.tensor"
OLD = "torch.distributed._tensor"
SPEC = f"{NEW}._dtensor_spec"
KINDS = f"{NEW}.placement_types"


def tensor(key, shape, kind="FloatStorage"):
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return part(key, kind, prod(shape), 0, shape, strides)


def part(key, kind, size, start, shape, strides):
    place = Outside(("storage", Name("torch", kind), key, "cpu", size))
    hooks = PickledCall(Name("collections", "OrderedDict"))
    return PickledCall(
        Name("torch._utils", "_rebuild_tensor_v2"), (place, start, shape, strides, False, hooks)
    )


def shard(dim, home=KINDS):
    return Made(Name(home, "Shard"), {"dim": dim})


def strided(dim, factor):
    return Made(Name(KINDS, "_StridedShard"), {"dim": dim, "split_factor": factor})


REPLICATE = Made(Name(KINDS, "Replicate"), {})


def partial(op, kind="Partial"):
    return Made(Name(KINDS, kind), {"reduce_op": op})


def mesh_of_ids(ids="1", shape=(2, 2), names=("dp", "tp")):
    """Up to torch 2.8: a tensor of ids."""
    return mesh_of_tensor(tensor(ids, shape, "IntStorage"), names)


def mesh_of_tensor(ids, names=None):
    state = {"device_type": "cpu", "mesh": ids}
    return Made(
        Name("torch.distributed.device_mesh", "DeviceMesh"), {**state, "mesh_dim_names": names}
    )


def mesh_of_layout(shape, stride, rank_map=(3, 1, 0, 2), names=("dp", "tp"), **state):
    """From torch 2.9: one layout over a list of ids."""
    layout = Made(
        Name("torch.distributed._mesh_layout", "_MeshLayout"), {"shape": shape, "stride": stride}
    )
    return around(layout, rank_map, names, state)


def mesh_of_axes(axes, rank_map=(3, 1, 0, 2), names=("dp", "tp"), **state):
    """From torch 2.12: a layout per axis."""
    home = "torch.distributed._mesh_layout"
    parts = tuple(
        Made(Name(home, "_FlatLayout"), {"shape": shape, "stride": stride})
        for shape, stride in axes
    )
    return around(Made(Name(home, "_MeshLayout"), {"axes": parts}), rank_map, names, state)


def around(layout, rank_map, names, state):
    kept = {"_layout": layout, "_mesh_dim_names": names, "_flatten_rank_map": rank_map, **state}
    return Made(Name("torch.distributed.device_mesh", "DeviceMesh"), kept)


def dtensor(mesh, placements, shape=(4, 6), local=(2, 3), home=NEW, slots=True, **spec):
    kind = Name(home, "DTensor")
    state = {
        "_local_tensor": tensor("0", local),
        "_spec": Made(Name(SPEC, "DTensorSpec"), {"mesh": mesh, "placements": placements, **spec}),
    }
    layout = PickledCall(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    device = PickledCall(Name("torch", "device"), ("cpu",))
    inner = (kind, Name("torch", "float32"), shape, (6, 1), 0, layout, device, False)
    wrapper = Name("torch._utils", "_rebuild_wrapper_subclass")
    args = (wrapper, kind, inner, (None, state) if slots else state)
    return PickledCall(Name("torch._tensor", "_rebuild_from_type_v2"), args)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pt"


def read(path, value, rank=None):
    ids = struct.pack("<4i", 3, 1, 0, 2)
    path.write_bytes(
        handmade([(b"x/data.pkl", pickled(value)), (b"x/data/0", bytes(24)), (b"x/data/1", ids)])
    )
    with storage_path(path).open() as file:
        found = read_torch_zip(file)
        return read_torch(found, found.pickle(file), rank=rank)


def spec_of(found):
    """Return how a tensor that was read is cut, axes by number."""
    assert isinstance(found, TorchTensor)
    placed = found.placed
    assert placed is not None
    order = dict(placed.shard_order or ()) or None
    return str(spec_of_placements(placed.placements, placed.shape, placed.mesh.shape, order))


CUT = (shard(0), shard(1))
MESHES = {
    "ids": mesh_of_ids(),
    "layout": mesh_of_layout((2, 2), (2, 1)),
    "layout of tuples": mesh_of_layout(((2,), (2,)), ((2,), (1,))),
    "axes": mesh_of_axes((((2,), (2,)), ((2,), (1,)))),
    "ids in a tensor beside the layout": mesh_of_axes(
        (((2,), (2,)), ((2,), (1,))), None, _rank_map=tensor("1", (4,), "IntStorage")
    ),
}


@pytest.mark.parametrize("form", MESHES)
def test_meshes_of_every_version(path, form):
    found = read(path, dtensor(MESHES[form], CUT))
    assert (found.placed.mesh.ids, found.placed.mesh.shape) == ((3, 1, 0, 2), (2, 2))
    assert found.placed.mesh.axis_names == ("dp", "tp")
    assert (found.global_shape, found.shape, found.dtype) == ((4, 6), (2, 3), "float32")
    assert spec_of(found) == "[S0,S1]"


@pytest.mark.parametrize(
    ("mesh", "ids", "shape"),
    [
        (mesh_of_layout((2, 2), (1, 2)), (3, 0, 1, 2), (2, 2)),
        (mesh_of_layout(4, 1, names=None), (3, 1, 0, 2), (4,)),
        (mesh_of_layout(((2, 2),), ((1, 2),), names=("all",)), (3, 0, 1, 2), (4,)),
        (mesh_of_axes((((2, 2), (1, 2)),), names=None), (3, 0, 1, 2), (4,)),
        (mesh_of_axes((((4,), (1,)), ((), ()))), (3, 1, 0, 2), (4, 1)),
        # Slices: the rank that wrote it tells which.
        (mesh_of_axes((((2,), (1,)),), names=None, _rank=1, _coordinate_on_dim=(1,)), (3, 1), (2,)),
        (mesh_of_axes((((2,), (1,)),), names=None, _rank=0, _coordinate_on_dim=(0,)), (0, 2), (2,)),
        (mesh_of_axes((((2,), (2,)),), names=None, _rank=2, _coordinate_on_dim=[1]), (1, 2), (2,)),
        (mesh_of_layout((2,), (2,), names=None, _coordinate_on_dim=[0]), (1, 2), (2,)),
        (mesh_of_axes((((), ()),), names=None, _rank=0, _coordinate_on_dim=(0,)), (0,), (1,)),
        # Slices of a tensor of ids.
        (mesh_of_tensor(part("1", "IntStorage", 4, 0, (2,), (2,))), (3, 0), (2,)),
        (mesh_of_tensor(part("1", "IntStorage", 4, 1, (2,), (2,))), (1, 2), (2,)),
        (mesh_of_tensor(part("1", "IntStorage", 4, 2, (2,), (1,))), (0, 2), (2,)),
        (mesh_of_tensor(part("1", "IntStorage", 4, 0, (2, 2), (1, 2))), (3, 0, 1, 2), (2, 2)),
        (mesh_of_tensor(part("1", "IntStorage", 4, 1, (2, 1), (2, 1))), (1, 2), (2, 1)),
    ],
)
def test_slices_and_other_orders_of_a_mesh(path, mesh, ids, shape):
    placements = (REPLICATE,) * len(shape)
    found = read(path, dtensor(mesh, placements, local=(4, 6)), rank=1)
    assert (found.placed.mesh.ids, found.placed.mesh.shape) == (ids, shape)
    assert spec_of(found) == "[R,R]"


@pytest.mark.parametrize(
    ("placements", "more", "spec"),
    [
        ((shard(0), shard(0)), {}, "[S01,R]"),
        ((shard(-1), REPLICATE), {}, "[R,S0]"),
        ((strided(0, 2), shard(0)), {}, "[S10,R]"),
        ((strided(0, 2), shard(0)), {"shard_order": None}, "[S10,R]"),
        ((shard(0), shard(0)), {"shard_order": ((0, (1, 0)),)}, "[S10,R]"),
        ((shard(0), shard(0)), {"shard_order": ((0, (0, 1)),)}, "[S01,R]"),
        ((REPLICATE, shard(1)), {"shard_order": ()}, "[R,S1]"),
        ((partial("sum"), shard(1)), {}, "[R,S1|P0]"),
        ((partial("avg"), REPLICATE), {}, "[R,R|Pavg0]"),
        ((partial("max", "_Partial"), partial("max")), {}, "[R,R|Pmax01]"),
    ],
)
def test_specs_of_torchs_placements(path, placements, more, spec):
    order = more.get("shard_order")
    if order:
        entry = Name(SPEC, "ShardOrderEntry")
        # A named tuple is made with its items as arguments, which `Call` writes alike.
        more = {"shard_order": tuple(PickledCall(entry, item) for item in order)}
    found = read(path, dtensor(mesh_of_ids(), placements, **more))
    assert spec_of(found) == spec


def test_places_of_older_versions(path):
    placements = (shard(0, f"{OLD}.placement_types"), shard(1))
    for home in (f"{OLD}.api", NEW, f"{NEW}._api"):
        for slots in (False, True):
            found = read(path, dtensor(mesh_of_ids(), placements, home=home, slots=slots))
            assert spec_of(found) == "[S0,S1]"


def test_one_mesh_for_many(path):
    mesh = mesh_of_ids()
    found = read(path, [dtensor(mesh, CUT), dtensor(mesh, CUT), tensor("0", (2, 3))])
    assert found[0].placed.mesh is found[1].placed.mesh
    assert isinstance(found[2], TorchTensor)
    assert found[2].placed is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (dtensor(mesh_of_ids(), ("Shard(0)", REPLICATE)), "placement 'Shard(0)' is unknown"),
        (dtensor(mesh_of_ids(), (shard("0"), REPLICATE)), "placement <Shard> is unknown"),
        (
            dtensor(mesh_of_ids(), (partial("premul_sum"), REPLICATE)),
            "placement <Partial> is unknown",
        ),
        (
            dtensor(mesh_of_ids(), (Made(Name(KINDS, "_MaskPartial"), {}),)),
            "_MaskPartial> is unknown",
        ),
        (dtensor(mesh_of_ids(), 7), "its mesh or its placements"),
        (dtensor(None, CUT), "its mesh or its placements"),
        (dtensor(mesh_of_ids("2"), CUT), "has no record 'data/2'"),
        (dtensor(mesh_of_ids(shape=(3, 2)), CUT), "has 16 bytes, but the pickle says 6 elements"),
        (
            dtensor(mesh_of_tensor(part("1", "IntStorage", 4, 2, (2,), (2,))), CUT),
            "reaches past its storage of 16 bytes",
        ),
        (
            dtensor(mesh_of_tensor(part("1", "IntStorage", 4, 1, (2,), (0,))), CUT),
            "arguments that it does not take",
        ),
        (dtensor(mesh_of_ids(names=("dp",)), CUT), "arguments that it does not take"),
        (dtensor(mesh_of_ids(names=(1, 2)), CUT), "axis name 1: use letters"),
        (dtensor(mesh_of_ids(names=({}, {})), CUT), "names of a mesh's axes are not text"),
        (dtensor(mesh_of_axes((((4,), (1,)), ((4,), (1,)))), CUT), "has 4 ids"),
        (dtensor(mesh_of_axes((((2,), (4,)), ((2,), (1,)))), CUT), "reaches past its 4 ids"),
        (dtensor(mesh_of_axes((((2,), (1,)), ((2,), (1,)))), CUT), "arguments that it does not"),
        (dtensor(mesh_of_axes((((2, 2), (1,)),)), CUT), "has 2 sizes, but 1 strides"),
        (dtensor(mesh_of_axes((((-2,), (1,)),)), CUT), "sizes are not whole numbers from 0"),
        (dtensor(mesh_of_axes((((2,), (1,)),), names=None), CUT), "a slice of a larger mesh"),
        (dtensor(mesh_of_axes((((2,), (1,)),), ("a", "b")), CUT), "a mesh has no ids"),
        (dtensor(mesh_of_layout((2, 2), (2, 1), None), CUT), "a mesh has no ids"),
        (
            dtensor(mesh_of_axes((((2,), (1,)),), _rank=0, _coordinate_on_dim=(5,)), CUT),
            "a slice of a larger mesh",
        ),
        (
            Made(Name("torch.distributed._shard.sharded_tensor.shard", "Shard"), {}),
            "a ShardedTensor, which FSDP1 makes without a device mesh, is read from torch DCP only",
        ),
        (dtensor(mesh_of_ids(), CUT, shard_order=7), "a shard order"),
        (dtensor(mesh_of_ids(), CUT, shard_order=((0,),)), "a shard order is not a list of dims"),
    ],
)
def test_what_is_no_dtensor(path, value, message):
    with pytest.raises(CheckpointError) as caught:
        read(path, value)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
