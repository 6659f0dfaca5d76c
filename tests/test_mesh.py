import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import time
from itertools import combinations, permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from shardspec import DeviceMesh
from shardspec.errors import AxisError, CommunicatorError, MeshError

SHAPES = [(5,), (2, 3), (3, 1, 2), (2, 2, 3), (2, 1, 3, 2), (2, 3, 1, 2, 2), (2, 1, 2, 3, 1, 2)]


def shuffled(size):
    """Distinct ids, in no order and with gaps."""
    return np.random.default_rng(size).permutation(3 * size)[:size] + 7


@pytest.fixture(params=SHAPES, ids=str)
def grid(request):
    return shuffled(prod(request.param)).reshape(request.param)


@pytest.fixture
def mesh(grid):
    return DeviceMesh(grid)


def test_coordinates_and_ids_are_those_of_the_array(mesh, grid):
    assert mesh.shape == grid.shape
    assert mesh.ndim == grid.ndim
    assert mesh.size() == grid.size
    assert [mesh.size(axis) for axis in range(mesh.ndim)] == list(grid.shape)
    assert mesh.ids == tuple(grid.ravel().tolist())
    for where, physical_id in np.ndenumerate(grid):
        assert mesh.coordinates(int(physical_id)) == where
        assert mesh.id_at(where) == physical_id
        assert int(physical_id) in mesh
    assert int(grid.max()) + 1 not in mesh
    assert "0" not in mesh


def test_groups_along_every_set_and_order_of_axes(mesh, grid):
    for count in range(grid.ndim + 1):
        for chosen in combinations(range(grid.ndim), count):
            for axes in permutations(chosen):
                rest = [axis for axis in range(grid.ndim) if axis not in axes]
                rows = grid.transpose(*rest, *axes).reshape(-1, prod(grid.shape[a] for a in axes))
                groups = mesh.groups(axes)
                assert groups == tuple(map(tuple, rows.tolist()))
                for group in groups:
                    assert mesh.group(group[0], axes) == group
                    assert mesh.group(group[-1], axes) == group


def test_submeshes_are_numpy_slices(mesh, grid):
    for count in range(grid.ndim):
        for axes in combinations(range(grid.ndim), count):
            for at in product(*(range(grid.shape[axis]) for axis in axes)):
                fixed = dict(zip(axes, at, strict=True))
                expected = grid[tuple(fixed.get(axis, slice(None)) for axis in range(grid.ndim))]
                assert mesh.submesh(fixed) == DeviceMesh(expected)


def test_a_submesh_keeps_names_and_links_of_its_axes():
    mesh = DeviceMesh(
        range(12),
        (2, 3, 2),
        mesh_alpha=(1e-5, 2e-5, 3e-5),
        mesh_beta=(1e-9, 2e-9, 3e-9),
        axis_names=("dp", "pp", "tp"),
        link_model="shared-bus",
    )
    sub = mesh.submesh({"pp": 1})
    assert sub.ids == (2, 3, 8, 9)
    assert sub.shape == (2, 2)
    assert sub.axis_names == ("dp", "tp")
    assert sub.mesh_alpha == (1e-5, 3e-5)
    assert sub.mesh_beta == (1e-9, 3e-9)
    assert sub.link_model == "shared-bus"
    assert mesh.submesh({}) == mesh


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([[4, 1, 0], [9, 2, 7]]),
        np.array([[4, 1, 0], [9, 2, 7]]),
        np.array([[4, 1, 0], [9, 2, 7]], dtype=np.uint8),
        [[4, 1, 0], [9, 2, 7]],
        ((4, 1, 0), [9, 2, 7]),
        [torch.tensor([4, 1, 0]), torch.tensor([9, 2, 7])],
        [np.array([4, 1, 0]), [np.int64(9), 2, torch.tensor(7)]],
        (iter(row) for row in [[4, 1, 0], [9, 2, 7]]),
    ],
)
def test_ids_may_come_as_tensor_array_or_nested_sequence(ids):
    mesh = DeviceMesh(ids)
    assert mesh == DeviceMesh([4, 1, 0, 9, 2, 7], (2, 3))
    assert all(type(physical_id) is int for physical_id in mesh.ids)


def test_a_shape_rearranges_the_ids_in_row_major_order():
    assert DeviceMesh(torch.arange(6), (3, 2)).id_at((2, 0)) == 4
    assert DeviceMesh([[0, 1, 2], [3, 4, 5]], (3, 2)) == DeviceMesh(range(6), (3, 2))
    assert DeviceMesh(range(6)).shape == (6,)
    assert DeviceMesh(range(6), torch.Size([2, 3])).shape == (2, 3)
    assert DeviceMesh(torch.tensor(5), (1, 1)).ids == (5,)


def test_logical_mesh_id_arranges_the_physical_ids():
    mesh = DeviceMesh(torch.arange(4), logical_mesh_id=torch.tensor([[0, 2], [1, 3]]))
    assert mesh.ids == (0, 2, 1, 3)
    assert mesh.shape == (2, 2)
    assert mesh.coordinates(2) == (0, 1)
    assert DeviceMesh(torch.arange(4), (2, 2), [[0, 2], [1, 3]]) == mesh


def test_equal_by_content():
    base: dict[str, Any] = {
        "mesh_alpha": (1e-5, 2e-5),
        "mesh_beta": (1e-9, 2e-9),
        "axis_names": ("a", "b"),
    }
    mesh = DeviceMesh(range(6), (2, 3), **base)
    assert DeviceMesh(torch.arange(6), (2, 3), **base) == mesh
    assert hash(DeviceMesh(np.arange(6), (2, 3), **base)) == hash(mesh)
    others = [
        DeviceMesh(range(6), (3, 2), **base),
        DeviceMesh([1, 0, 2, 3, 4, 5], (2, 3), **base),
        DeviceMesh(range(6), (2, 3), **{**base, "axis_names": ("a", "c")}),
        DeviceMesh(range(6), (2, 3), **{**base, "axis_names": None}),
        DeviceMesh(range(6), (2, 3), **{**base, "mesh_alpha": (1e-5, 3e-5)}),
        DeviceMesh(range(6), (2, 3), **{**base, "mesh_beta": (1e-9, 3e-9)}),
        DeviceMesh(range(6), (2, 3), link_model="shared-bus", **base),
    ]
    assert len({mesh, *others}) == 8


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda mesh: pickle.loads(pickle.dumps(mesh))]
)
def test_copies_are_equal_and_whole(again):
    mesh = DeviceMesh([5, 3], (2,), [3, 5], (1e-5,), (1e-9,), axis_names=("x",))
    twin = again(mesh)
    assert twin == mesh
    assert hash(twin) == hash(mesh)
    assert twin.coordinates(5) == (1,)
    assert repr(twin) == repr(mesh)


def test_a_mesh_from_another_process_is_found_in_a_dict():
    script = (
        "import pickle, sys; from shardspec.mesh.device_mesh import DeviceMesh;"
        "sys.stdout.buffer.write(pickle.dumps(DeviceMesh(range(4), (2, 2), axis_names='ab')))"
    )
    for seed in "12":
        made = subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        assert pickle.loads(made) in {DeviceMesh(range(4), (2, 2), axis_names="ab")}


def test_a_mesh_cannot_be_changed():
    mesh = DeviceMesh(range(4), (2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh.shape = (4,)  # type: ignore[misc]  # the very thing that must fail
    assert not hasattr(mesh, "__dict__")


def test_axes_by_number_and_by_name():
    mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
    assert [mesh.axis(a) for a in (0, 1, "dp", "tp")] == [0, 1, 0, 1]
    assert mesh.axis_labels() == ["dp", "tp"]
    assert DeviceMesh(range(8), (2, 4)).axis_labels([1]) == ["1"]
    assert mesh.group(6, ["tp"]) == mesh.group(6, [1]) == (4, 5, 6, 7)
    assert mesh.groups(["dp"]) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_text_of_a_mesh_is_its_shape_with_names():
    assert str(DeviceMesh(range(8), (2, 4))) == "2x4"
    assert str(DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))) == "dp=2,tp=4"


def test_repr_makes_the_mesh_again_and_is_short_for_large_ones():
    meshes = [
        DeviceMesh([3, 1]),
        DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp")),
        DeviceMesh([5, 4], (1, 2), None, (1e-5, 0), (1e-9, 2e-9), link_model="shared-bus"),
    ]
    assert [eval(repr(mesh)) for mesh in meshes] == meshes
    assert repr(meshes[0]) == "DeviceMesh((3, 1), (2,))"
    assert repr(DeviceMesh(range(65_536), (256, 256))) == "DeviceMesh(range(65536), (256, 256))"
    assert repr(DeviceMesh(range(100, 0, -1))) == (
        "DeviceMesh((100, 99, 98, 97, 96, 95, 94, 93, … 100 in all), (100,))"
    )


def test_links_are_kept_as_floats():
    mesh = DeviceMesh(range(6), (2, 3), mesh_alpha=[0, 1], mesh_beta=(2, 3.0))
    assert mesh.mesh_alpha == (0.0, 1.0)
    assert mesh.mesh_beta == (2.0, 3.0)
    assert all(type(value) is float for value in (*mesh.mesh_alpha, *mesh.mesh_beta))


def test_65536_devices_are_quick():
    ids = shuffled(65_536)
    start = time.process_time()
    mesh = DeviceMesh(ids, (16, 16, 256))
    twin = DeviceMesh(torch.from_numpy(ids), (16, 16, 256))
    assert mesh == twin
    assert len({mesh, twin}) == 1
    assert all(mesh.id_at(mesh.coordinates(physical_id)) == physical_id for physical_id in mesh.ids)
    rows = ids.reshape(16, 16, 256).transpose(1, 2, 0).reshape(-1, 16)
    assert mesh.groups([0]) == tuple(map(tuple, rows.tolist()))
    assert mesh.submesh({0: 3}).ids == tuple(ids[3 * 4096 : 4 * 4096].tolist())
    assert time.process_time() - start < 5  # about 0.5 s on one slow core


def mesh_error(*args, **kwargs):
    with pytest.raises(MeshError) as caught:
        DeviceMesh(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ids_that_are_no_ids():
    assert mesh_error([0, 1, 0], (3,)) == (
        "device id 0 appears more than once; every id must be distinct"
    )
    assert mesh_error([0, -2], (2,)) == (
        "device id -2 is negative; ids are global rank numbers from 0"
    )
    assert mesh_error([0, 1.5], (2,)) == "device id 1.5 is not a whole number"
    assert mesh_error(torch.tensor([0.0, 1.5])) == "device id 1.5 is not a whole number"
    assert mesh_error([True, False]) == "device id True is not a whole number"
    assert mesh_error(["01"]) == "device id '01' is not a whole number"
    assert mesh_error([[0, 1], [2]]) == "the device ids form no grid: rows differ in length"


def test_ids_that_do_not_fill_the_shape():
    assert mesh_error(range(7), (2, 4)) == ("mesh shape 2x4 needs 8 device ids, but 7 were given")
    none = "give at least one axis, each of at least 1 device"
    assert mesh_error(range(7), ()) == f"mesh shape (): {none}"
    assert mesh_error([], (0, 2)) == f"mesh shape (0, 2): {none}"
    assert mesh_error([]) == f"mesh shape (0,): {none}"


def test_a_device_type_stands_before_the_ids_as_in_torch():
    square = DeviceMesh([[0, 1], [2, 3]])
    assert DeviceMesh("cuda", [[0, 1], [2, 3]]) == square
    assert DeviceMesh("cpu", mesh=torch.arange(4).view(2, 2)) == square
    assert DeviceMesh(device_type="cuda", mesh=np.arange(4).reshape(2, 2)) == square
    assert DeviceMesh(mesh=[[0, 1], [2, 3]]) == square
    assert DeviceMesh([0, 1, 2, 3], (2, 2), device_type="cuda") == square
    named = DeviceMesh("cuda", [[2, 0]], mesh_dim_names=("dp", "tp"))
    assert (named.ids, named.mesh_dim_names) == ((2, 0), ("dp", "tp"))
    assert DeviceMesh("cuda", [0, 1, 2, 3]).shape == (4,)
    after = (
        "DeviceMesh('cuda', ...): give nested ids after the device type, as in "
        "DeviceMesh('cuda', [[0, 1], [2, 3]])"
    )
    assert mesh_error("cuda") == after
    assert mesh_error("cuda", [0, 1], mesh=[0, 1]) == after
    assert mesh_error("cuda", [0, 1], device_type="cpu") == after
    assert mesh_error("cuda", [0, 1], (2,)) == after
    once = "give the device ids once, as in DeviceMesh([[0, 1], [2, 3]])"
    assert mesh_error() == mesh_error([0, 1], mesh=[0, 1]) == once
    assert mesh_error("cuda:0", [0, 1]) == (
        "device type 'cuda:0': give a name without an index, 'cpu' or 'cuda'"
    )
    assert mesh_error("cpu", [[0, 1], [2]]).endswith("rows differ in length")


def test_sizes_and_ids_in_torchs_words():
    mesh = DeviceMesh([[4, 1, 0], [2, 9, 3]], mesh_dim_names=("replicate", "shard"))
    assert (mesh.size(), mesh.size(0), mesh.size("shard"), mesh.size(mesh_dim=1)) == (6, 2, 3, 3)
    assert mesh.mesh.tolist() == [[4, 1, 0], [2, 9, 3]]
    assert mesh.mesh.dtype == torch.int
    assert DeviceMesh(range(2)).mesh_dim_names is None
    with pytest.raises(AxisError, match="axis 2 is out of range"):
        mesh.size(2)
    with pytest.raises(AxisError, match="no axis named 'tp'; its names: replicate, shard"):
        mesh.size("tp")


def test_a_flat_mesh_has_the_same_ids_and_the_slowest_link():
    mesh = DeviceMesh([[4, 1, 0], [2, 9, 3]], axis_names=("dp", "cp"))
    assert mesh.flatten() == DeviceMesh([4, 1, 0, 2, 9, 3], axis_names=("dp_cp",))
    assert mesh.flatten("all").axis_names == ("all",)
    plain = DeviceMesh(range(4), (2, 2), None, (1e-6, 5e-5), (3e-9, 1e-10), link_model="shared-bus")
    assert plain.flatten() == DeviceMesh(
        range(4), (4,), None, (5e-5,), (3e-9,), link_model="shared-bus"
    )
    assert plain.flatten().flatten() == plain.flatten()
    with pytest.raises(MeshError, match="axis name 'd-p': use letters"):
        mesh.flatten("d-p")


def test_what_torchs_functions_ask_for_is_refused_in_a_sentence():
    mesh = DeviceMesh(range(4), (2, 2))
    assert mesh.device_type == "cpu"
    for name in ("_get_root_mesh", "_flatten", "_dim_group_names"):
        with pytest.raises(MeshError) as caught:
            getattr(mesh, name)
        assert str(caught.value) == (
            "this is a shardspec mesh; pass mesh.to_torch() to torch functions"
        )
        assert not hasattr(mesh, name)
    with pytest.raises(AttributeError, match="no attribute 'shpae'"):
        mesh.shpae  # type: ignore[attr-defined]  # noqa: B018


def test_questions_about_the_calling_rank_need_a_job():
    mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    for ask in (mesh.get_rank, mesh.get_coordinate, lambda: mesh.get_local_rank("tp")):
        with pytest.raises(CommunicatorError) as caught:
            ask()
        assert str(caught.value) == (
            "torch.distributed is not initialized, so this process has no rank; start the program "
            "with torchrun, or name a device, as in mesh.coordinates(0)"
        )
    with pytest.raises(CommunicatorError, match="get_group returns a group of the calling rank"):
        mesh.get_group(0)
    with pytest.raises(AxisError, match=r"name one, as in get_local_rank\('dp'\)"):
        mesh.get_local_rank()


def test_logical_ids_that_differ_from_the_physical_ones():
    assert mesh_error(range(4), logical_mesh_id=[[0, 1], [2, 4]]) == (
        "logical_mesh_id has the ids (0, 1, 2, 4) but physical_mesh_id has (0, 1, 2, 3); "
        "give the same ids in both"
    )
    assert mesh_error(range(20), logical_mesh_id=range(19)) == (
        "logical_mesh_id has the ids (0, 1, 2, 3, 4, 5, 6, 7, … 19 in all) but physical_mesh_id "
        "has (0, 1, 2, 3, 4, 5, 6, 7, … 20 in all); give the same ids in both"
    )
    assert mesh_error(range(4), (4,), [[0, 1], [2, 3]]) == (
        "mesh_shape (4,) differs from the shape (2, 2) of logical_mesh_id; give one of the two"
    )
    assert mesh_error(range(2), logical_mesh_id=[0, 0, 1]) == (
        "device id 0 appears more than once; every id must be distinct"
    )


def test_axis_names_that_do_not_fit():
    assert mesh_error(range(4), (2, 2), axis_names=("dp",)) == (
        "1 axis name given for a mesh with 2 axes"
    )
    assert mesh_error(range(4), (2, 2), axis_names=("dp", "dp")) == (
        "axis names ('dp', 'dp') repeat; every name must be distinct"
    )
    for name in ("", "0", "a b", "d-p"):
        assert mesh_error(range(4), axis_names=(name,)) == (
            f"axis name {name!r}: use letters, digits and '_', a letter first"
        )


def test_links_that_do_not_fit():
    assert mesh_error(range(4), (2, 2), mesh_alpha=(1e-5,), mesh_beta=(1e-9, 1e-9)) == (
        "1 mesh_alpha value given for a mesh with 2 axes"
    )
    for value in (-1.0, float("nan"), float("inf")):
        assert mesh_error(range(4), mesh_alpha=(1e-5,), mesh_beta=(value,)) == (
            f"mesh_beta ({value},): each value must be a finite number, not negative"
        )
    for value in (1.7e308, 1.1e9, 5e-324, 10**400, True):
        assert mesh_error(range(4), mesh_alpha=(value,), mesh_beta=(1e-9,)).endswith(
            "each value must be 0, or from 1e-100 to 1e9 s"
        )
    assert mesh_error(range(4), mesh_alpha=("1",), mesh_beta=(1e-9,)).endswith("not negative")
    assert mesh_error(range(4), mesh_alpha=(1e-5,)) == (
        "give both mesh_alpha and mesh_beta, or neither"
    )
    assert mesh_error(range(4), link_model="tree") == (
        "link_model 'tree': use one of ('ring', 'shared-bus')"
    )


def test_questions_about_axes_and_devices_the_mesh_lacks():
    mesh = DeviceMesh(range(6), (2, 3))
    named = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))
    cases = [
        (lambda: mesh.axis(2), "axis 2 is out of range: mesh 2x3 has 2 axes, numbered from 0"),
        (lambda: mesh.axis(-1), "axis -1 is out of range: mesh 2x3 has 2 axes, numbered from 0"),
        (
            lambda: DeviceMesh(range(2)).group(0, [1]),
            "axis 1 is out of range: mesh 2 has 1 axis, numbered from 0",
        ),
        (lambda: mesh.axis("dp"), "mesh 2x3 has no axis named 'dp'; its names: none, only numbers"),
        (
            lambda: named.groups(["pp"]),
            "mesh dp=2,tp=3 has no axis named 'pp'; its names: dp, tp",
        ),
        (lambda: named.group(0, [1, "tp"]), "axes (1, 1) name one axis twice; name each once"),
        (lambda: mesh.groups([0, 0]), "axes (0, 0) name one axis twice; name each once"),
        (
            lambda: mesh.submesh({2: 0}),
            "axis 2 is out of range: mesh 2x3 has 2 axes, numbered from 0",
        ),
        (lambda: named.submesh({"dp": 0, 0: 1}), "axes (0, 0) name one axis twice; name each once"),
    ]
    for ask, message in cases:
        with pytest.raises(AxisError) as caught:
            ask()
        assert str(caught.value) == message


def test_questions_about_places_the_mesh_lacks():
    mesh = DeviceMesh(range(6), (2, 3))
    cases = [
        (lambda: mesh.coordinates(6), "device 6 is not in the mesh of ids (0, 1, 2, 3, 4, 5)"),
        (lambda: mesh.group(9, [0]), "device 9 is not in the mesh of ids (0, 1, 2, 3, 4, 5)"),
        (lambda: mesh.id_at((2, 0)), "coordinates (2, 0) are outside mesh 2x3"),
        (lambda: mesh.id_at((-1, 0)), "coordinates (-1, 0) are outside mesh 2x3"),
        (lambda: mesh.id_at((0,)), "coordinates (0,) are outside mesh 2x3"),
        (lambda: mesh.submesh({0: 2}), "index 2 is outside axis 0 of mesh 2x3"),
        (lambda: mesh.submesh({1: -1}), "index -1 is outside axis 1 of mesh 2x3"),
        (
            lambda: mesh.submesh({0: 0, 1: 0}),
            "fixing every axis of mesh 2x3 leaves no mesh; keep one axis",
        ),
    ]
    for ask, message in cases:
        with pytest.raises(MeshError) as caught:
            ask()
        assert str(caught.value) == message


@pytest.mark.parametrize("shape", [8, 2.5, (2, 4.0), ("2", "4")])
def test_a_shape_is_a_sequence_of_whole_numbers(shape):
    with pytest.raises(MeshError, match="give a sequence of whole numbers, as in"):
        DeviceMesh(range(8), shape)


def test_ids_in_a_tensor_of_floats():
    """`torch.Tensor([...])` has them, as programs of Colossal-AI write it."""
    assert DeviceMesh(torch.Tensor([0, 1, 2, 3]), (2, 2)) == DeviceMesh(range(4), (2, 2))
    assert DeviceMesh(np.array([[0.0, 1.0]])) == DeviceMesh([[0, 1]])
    for ids in (torch.Tensor([0, 1.5]), [0.0, 1.0]):
        with pytest.raises(MeshError, match="is not a whole number"):
            DeviceMesh(ids)


def test_links_of_a_mesh():
    mesh = DeviceMesh(range(8), (2, 4), links=["ib-ndr-per-gpu", "h100-nvswitch"])
    assert mesh.submesh({0: 1}).links == ("h100-nvswitch",)
    assert mesh.flatten().links is None
    assert pickle.loads(pickle.dumps(mesh)) == mesh != DeviceMesh(range(8), (2, 4))
    assert eval(repr(mesh)) == mesh
    with pytest.raises(MeshError, match="3 links for 2 axes"):
        DeviceMesh(range(8), (2, 4), links=("unit",) * 3)
    with pytest.raises(MeshError, match="not both"):
        DeviceMesh(range(2), mesh_alpha=(1e-6,), mesh_beta=(1e-9,), links="unit")
