import dataclasses
import pickle
from itertools import permutations, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardspec import DeviceMesh, Layout, ShardingSpec
from shardspec.boxes import Box, box_shape, box_size, intersect
from shardspec.errors import AxisError, DTypeError, LayoutError, MeshError
from shardspec.layout.layout import resolve_axes

MESHES = [
    DeviceMesh([3, 0, 9, 4], (4,)),
    DeviceMesh([5, 1, 0, 2, 8, 3], (2, 3)),
    DeviceMesh([5, 1, 0, 2, 8, 3], (3, 2)),
    DeviceMesh(reversed(range(12)), (2, 2, 3)),
]
SHAPES = [
    (),
    (0,),
    (1,),
    (5,),
    (7,),
    (8,),
    (13,),
    (24,),
    (7, 5),
    (3, 0),
    (1, 13),
    (6, 12),
    (2, 7, 3),
]


def all_specs(dims, axes):
    """Every spec without partials: every way to put some axes, in order, on the dims."""
    for count in range(axes + 1):
        for chosen in permutations(range(axes), count):
            for at in product(range(dims), repeat=count):
                # Each spec once: the order of axes on different dims makes no difference.
                if list(at) == sorted(at):
                    cuts: dict[int, list[int | str]] = {}
                    for axis, dim in zip(chosen, at, strict=True):
                        cuts.setdefault(dim, []).append(axis)
                    yield ShardingSpec(dims, cuts)


def all_layouts(mesh):
    for shape in SHAPES:
        for spec in all_specs(len(shape), mesh.ndim):
            yield Layout(mesh, spec, shape, "int64")


def test_the_specs_are_all_there():
    # One dim: 1 + n of one axis + … ; in general sum over k of n!/(n-k)! * C(k+dims-1, dims-1).
    counts = {(0, 3): 1, (1, 1): 2, (1, 2): 5, (1, 3): 16, (2, 2): 11, (2, 3): 49, (3, 3): 106}
    for (dims, axes), count in counts.items():
        specs = list(all_specs(dims, axes))
        assert len(specs) == len(set(specs)) == count


def nested_chunks(layout, device):
    """The shard by the plain definition: chunk of chunk of … of the tensor, major axis first."""
    part = torch.arange(prod(layout.global_shape)).reshape(layout.global_shape)
    at = layout.mesh.coordinates(device)
    for dim, axes in layout.spec.dim_partition_dict.items():
        for axis in axes:
            chunks = part.chunk(layout.mesh.shape[axis], dim)
            # torch.chunk leaves empty chunks out, and keeps one chunk of an empty dim.
            part = chunks[at[axis]] if at[axis] < len(chunks) else part.narrow(dim, 0, 0)
    return part


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_shard_is_a_chunk_of_a_chunk(mesh):
    for layout in all_layouts(mesh):
        whole = torch.arange(prod(layout.global_shape)).reshape(layout.global_shape)
        for device, box in layout.boxes().items():
            shard = whole[tuple(slice(lo, hi) for lo, hi in box)]
            assert torch.equal(shard, nested_chunks(layout, device)), (layout, device)
            assert layout.local_shape(device) == tuple(shard.shape) == box_shape(box)
            assert layout.box(device) == box


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_boxes_tile_the_tensor_and_replicas_differ_only_along_unused_axes(mesh):
    for layout in all_layouts(mesh):
        boxes = layout.boxes()
        unused = [axis for axis in range(mesh.ndim) if axis not in layout.spec.axes]
        holders = np.zeros(layout.global_shape, dtype=int)
        for box in boxes.values():
            holders[tuple(slice(lo, hi) for lo, hi in box)] += 1
        copies = prod(mesh.shape[axis] for axis in unused)
        assert (holders == copies).all(), layout
        for group in mesh.groups(unused):
            assert {boxes[device] for device in group} == {boxes[group[0]]}, layout
            for other in boxes.keys() - set(group):
                assert intersect(boxes[group[0]], boxes[other]) is None, layout


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_largest_shard_is_that_of_the_first_device(mesh):
    for layout in all_layouts(mesh):
        sizes = [box_size(box) for box in layout.boxes().values()]
        assert layout.max_local_bytes == 8 * max(sizes)
        assert layout.global_bytes == 8 * prod(layout.global_shape)


def test_boxes_by_hand():
    mesh = DeviceMesh([10, 11, 20, 21], (2, 2))

    def rows(spec: str, size: int) -> dict[int, Box]:
        return Layout(mesh, spec, (size,), "f32").boxes()

    assert rows("[S01]", 8) == {10: ((0, 2),), 11: ((2, 4),), 20: ((4, 6),), 21: ((6, 8),)}
    assert rows("[S10]", 8) == {10: ((0, 2),), 20: ((2, 4),), 11: ((4, 6),), 21: ((6, 8),)}
    assert rows("[S0]", 8) == {10: ((0, 4),), 11: ((0, 4),), 20: ((4, 8),), 21: ((4, 8),)}
    assert rows("[S1]", 8) == {10: ((0, 4),), 20: ((0, 4),), 11: ((4, 8),), 21: ((4, 8),)}
    assert rows("[R|P01]", 3) == dict.fromkeys((10, 11, 20, 21), ((0, 3),))
    assert rows("[S0|P1]", 3) == {10: ((0, 2),), 11: ((0, 2),), 20: ((2, 3),), 21: ((2, 3),)}
    # 5 is cut into 3 and 2, then 3 into 2 and 1, and 2 into 1 and 1; it is not cut into 2, 2, 1.
    assert rows("[S01]", 5) == {10: ((0, 2),), 11: ((2, 3),), 20: ((3, 4),), 21: ((4, 5),)}


def test_what_is_empty_starts_at_the_end_of_the_dim():
    mesh = DeviceMesh(range(6), (2, 3))
    boxes = Layout(mesh, "[S01]", (8,), "f32").boxes()
    assert [boxes[i] for i in range(6)] == [
        ((0, 2),),
        ((2, 4),),
        ((8, 8),),
        ((4, 6),),
        ((6, 8),),
        ((8, 8),),
    ]
    assert Layout(mesh, "[S1,R]", (2, 5), "f32").box(2) == ((2, 2), (0, 5))
    assert Layout(mesh, "[S1,S0]", (0, 5), "f32").box(5) == ((0, 0), (3, 5))


def test_a_scalar_is_whole_everywhere():
    layout = Layout(DeviceMesh(range(4), (2, 2)), "[]", (), torch.float64)
    assert layout.boxes() == dict.fromkeys(range(4), ())
    assert layout.local_shape(3) == ()
    assert layout.max_local_bytes == layout.global_bytes == 8


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 50), max_size=4).map(tuple),
    st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
    st.randoms(use_true_random=False),
)
def test_any_layout_of_any_shape_tiles_the_tensor(shape, mesh_shape, random):
    mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
    cuts: dict[int, list[int | str]] = {}
    axes = list(range(mesh.ndim))
    random.shuffle(axes)
    for axis in axes:
        if shape and random.random() < 0.8:
            cuts.setdefault(random.randrange(len(shape)), []).append(axis)
    layout = Layout(mesh, ShardingSpec(len(shape), cuts), shape, "u8")
    copies = prod(n for axis, n in enumerate(mesh_shape) if axis not in layout.spec.axes)
    assert sum(box_size(box) for box in layout.boxes().values()) == copies * prod(shape)
    boxes = sorted(set(layout.boxes().values()))
    assert all(intersect(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])


def test_names_become_numbers():
    mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
    layout = Layout(mesh, "[S(tp,dp),R]", torch.Size([16, 3]), torch.bfloat16)
    assert str(layout.spec) == "[S10,R]"
    assert layout == Layout(mesh, ShardingSpec(2, {0: [1, 0]}), [16, 3], "bf16")
    assert layout.dtype == "bfloat16"
    assert layout.global_shape == (16, 3)
    assert str(layout) == "[S10,R] of [16, 3] bfloat16 on dp=2,tp=4"
    assert str(resolve_axes(ShardingSpec.parse("[S(dp)|Pmax(tp)]"), mesh)) == "[S0|Pmax1]"
    assert str(layout.with_spec("[S(dp),S(tp)]").spec) == "[S0,S1]"


def test_a_layout_is_a_value():
    mesh = DeviceMesh(range(4), (2, 2))
    layout = Layout(mesh, "[S0,R]", (4, 4), "f32")
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(pickle.loads(pickle.dumps(layout))) == hash(layout)
    others = [
        Layout(mesh, "[S1,R]", (4, 4), "f32"),
        Layout(mesh, "[S0,R]", (4, 5), "f32"),
        Layout(mesh, "[S0,R]", (4, 4), "bf16"),
        Layout(DeviceMesh(range(4), (4,)), "[S0,R]", (4, 4), "f32"),
    ]
    assert len({layout, *others}) == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dtype = "int8"  # type: ignore[misc]  # the very thing that must fail


NAMED = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (
            "[S0]",
            (4, 4),
            "spec [S0] is for 1 dim, but the tensor of shape (4, 4) has 2 dims",
        ),
        ("[S0,R]", (), "spec [S0,R] is for 2 dims, but the tensor of shape () has 0 dims"),
        ("[]", (1,), "spec [] is for 0 dims, but the tensor of shape (1,) has 1 dim"),
        ("[S0]", (-4,), "global shape (-4,): give a sequence of whole numbers from 0"),
        ("[S0]", (2.5,), "global shape (2.5,): give a sequence of whole numbers from 0"),
        ("[S0]", 4, "global shape 4: give a sequence of whole numbers from 0"),
    ],
)
def test_a_shape_that_does_not_fit(spec, shape, message):
    with pytest.raises(LayoutError) as caught:
        Layout(NAMED, spec, shape, "f32")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "[S2]",
            "spec [S2]: axis 2 is out of range: mesh dp=2,tp=3 has 2 axes, numbered from 0",
        ),
        (
            "[R|P2]",
            "spec [R|P2]: axis 2 is out of range: mesh dp=2,tp=3 has 2 axes, numbered from 0",
        ),
        ("[S(pp)]", "spec [S(pp)]: mesh dp=2,tp=3 has no axis named 'pp'; its names: dp, tp"),
        (
            "[S(0,dp)]",
            "spec [S(0,dp)]: axis 0 is used twice, by dim 0 and by dim 0; "
            "a mesh axis can shard a tensor only once",
        ),
        (
            "[S(tp)|P1]",
            "spec [S(tp)|P1]: axis 1 is used twice, by dim 0 and by the pending sum; "
            "a mesh axis can shard a tensor only once",
        ),
        (
            "[R|P(0,dp)]",
            "spec [R|P(0,dp)]: axis dp is pending twice, by name and by number",
        ),
    ],
)
def test_axes_that_the_mesh_lacks_or_that_mean_the_same(spec, message):
    with pytest.raises(AxisError) as caught:
        Layout(NAMED, spec, (4,), "f32")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        ("[R|Pavg0]", "int32", "a pending avg of int32 has no exact result; use sum and divide"),
        ("[R|Pavg0]", "bool", "a pending avg of bool has no exact result; use sum and divide"),
        (
            "[R|Pmax0]",
            torch.complex64,
            "max is not defined for complex64: complex numbers have no order",
        ),
        (
            "[R|Pmin0]",
            torch.complex64,
            "min is not defined for complex64: complex numbers have no order",
        ),
        (
            "[R|P0]",
            "fp8",
            "no reduction is defined for float8_e4m3fn; convert to a wider dtype first",
        ),
    ],
)
def test_reductions_that_a_dtype_does_not_have(spec, dtype, message):
    with pytest.raises(DTypeError) as caught:
        Layout(NAMED, spec, (4,), dtype)
    assert str(caught.value) == message
    assert Layout(NAMED, "[S0]", (4,), dtype).local_shape(0) == (2,)


def test_a_device_that_the_mesh_lacks():
    layout = Layout(NAMED, "[S0]", (4,), "f32")
    for ask in (layout.box, layout.local_shape):
        with pytest.raises(MeshError) as caught:
            ask(6)
        assert str(caught.value) == "device 6 is not in the mesh of ids (0, 1, 2, 3, 4, 5)"
