"""Arguments of odd types and sizes from Python: taken where they mean something, else one error."""

from typing import Any

import numpy as np
import pytest

from shardspec import DeviceMesh, Layout, LayoutConverter, ShardingSpec, ShardSpecError
from shardspec.errors import AxisError, LayoutError, MeshError, SpecSyntaxError
from shardspec.text import printable, shown

MESH = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
SELF: list[Any] = []
SELF.append(SELF)


def test_dims_as_json_has_keys():
    """What a spec says of itself comes back from JSON with text for keys."""
    assert str(ShardingSpec(2, {"0": [0]})) == "[S0,R]"
    assert str(ShardingSpec(3, {"2": [1, 0]}, partial={"2": "avg"})) == "[R,R,S10|Pavg2]"


def test_numbers_of_other_libraries():
    dims: Any = np.int64(2)
    cuts: Any = {np.int64(1): np.array([0, 1])}
    spec = ShardingSpec(dims, cuts)
    assert spec == ShardingSpec.parse("[R,S01]")
    assert all(type(axis) is int for axis in spec.axes)
    shape: Any = np.array([4, 4])
    assert Layout(MESH, spec, shape, "f32").global_shape == (4, 4)
    alpha: Any = np.array([1e-5, 3e-6])
    assert DeviceMesh(range(4), (2, 2), mesh_alpha=alpha, mesh_beta=(0, 1)).mesh_beta == (0.0, 1.0)


def test_names_of_axes_as_torch_calls_them():
    assert DeviceMesh(range(4), (2, 2), mesh_dim_names=("dp", "tp")) == MESH
    with pytest.raises(MeshError, match="axis_names and mesh_dim_names are the same; give one"):
        DeviceMesh(range(2), axis_names=("a",), mesh_dim_names=("a",))


SPECS: list[tuple[tuple[Any, ...], str]] = [
    (
        (2, {"0": [0], 0: [1]}),
        "dim_partition_dict has the key 0 twice, as a number and as text; give one",
    ),
    (
        (2, {0.5: [0]}),
        "dim_partition_dict names dim 0.5, but the tensor has 2 dims, numbered from 0",
    ),
    (
        (2, {True: [0]}),
        "dim_partition_dict names dim True, but the tensor has 2 dims, numbered from 0",
    ),
    (
        (2, {"x": [0]}),
        "dim_partition_dict names dim 'x', but the tensor has 2 dims, numbered from 0",
    ),
    ((2, {"9" * 5000: [0]}), "dim_partition_dict names dim '999"),
    ((2, [0]), "dim_partition_dict is a list; give a dict, as in {0: [0]}"),
    (("2",), "a tensor cannot have '2' dims, only 0 to 1024"),
    ((2.0,), "a tensor cannot have 2.0 dims, only 0 to 1024"),
    ((10**12,), "a tensor cannot have 1000000000000 dims, only 0 to 1024"),
    ((10**5000,), "a tensor cannot have a very large int dims, only 0 to 1024"),
    ((1, {0: [1.0]}), "axis 1.0: give a number from 0 or a name"),
    ((1, {0: [None]}), "axis None: give a number from 0 or a name"),
]


@pytest.mark.parametrize(("args", "message"), SPECS, ids=lambda value: shown(value, 40))
def test_specs_that_are_refused(args, message):
    with pytest.raises(AxisError) as caught:
        ShardingSpec(*args)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", [5, None, b"[R]", ["[R]"]])
def test_texts_of_specs_that_are_none(text):
    with pytest.raises(SpecSyntaxError, match="a spec is text such as"):
        ShardingSpec.parse(text)


MESHES: list[tuple[dict[str, Any], str]] = [
    ({"mesh_alpha": 1e-5, "mesh_beta": 1e-9}, "mesh_alpha values 1e-05: give one number per axis"),
    ({"mesh_alpha": ("a", "b"), "mesh_beta": (1, 1)}, "mesh_alpha ('a', 'b'): each value must be"),
    ({"mesh_alpha": (10**400, 0), "mesh_beta": (1, 1)}, "mesh_alpha"),
    ({"axis_names": 5}, "axis names 5: give a sequence, as in ('dp', 'tp')"),
    ({"axis_names": (1, 2)}, "axis name 1: use letters, digits and '_'"),
    ({"link_model": []}, "link_model []: use one of"),
    ({"mesh_shape": 4}, "mesh_shape 4: give a sequence of whole numbers"),
    ({"mesh_shape": "22"}, "mesh_shape '22': give a sequence of whole numbers"),
    ({"mesh_shape": (2, True)}, "mesh_shape (2, True): give a sequence of whole numbers"),
    ({"mesh_shape": 4, "logical_mesh_id": [[0, 1], [2, 3]]}, "mesh_shape 4: give a sequence"),
    ({"mesh_shape": (10**5000,)}, "mesh shape a very large int needs a very large int device ids"),
    ({"physical_mesh_id": SELF}, "the device ids are nested more than 64 deep"),
    ({"physical_mesh_id": None}, "give the device ids once, as in DeviceMesh([[0, 1], [2, 3]])"),
    ({"physical_mesh_id": [0, 1.0, 2, 3]}, "device id 1.0 is not a whole number"),
    ({"physical_mesh_id": "0123"}, "device type '0123': give a name without an index"),
    ({"physical_mesh_id": ["0", 1, 2, 3]}, "device id '0' is not a whole number"),
    ({"physical_mesh_id": [None, 1, 2, 3]}, "device id None is not a whole number"),
]


@pytest.mark.parametrize(("given", "message"), MESHES, ids=lambda value: shown(value, 40))
def test_meshes_that_are_refused(given, message):
    with pytest.raises(MeshError) as caught:
        DeviceMesh(**{"physical_mesh_id": range(4), "mesh_shape": (2, 2), **given})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: MESH.axis(1.0),  # type: ignore[arg-type]  # as users do
        lambda: MESH.axis(None),  # type: ignore[arg-type]
        lambda: MESH.axis("x" * 1000),
        lambda: MESH.group(0, 5),  # type: ignore[arg-type]
        lambda: MESH.group(0, "dp"),
        lambda: MESH.submesh({"dp": "x"}),  # type: ignore[dict-item]
        lambda: Layout("x", "[R]", (4,), "f32"),  # type: ignore[arg-type]
        lambda: Layout(MESH, "[R]", 4, "f32"),  # type: ignore[arg-type]
        lambda: Layout(MESH, "[R]", "4", "f32"),  # type: ignore[arg-type]
        lambda: Layout(MESH, "[R]", (4.0,), "f32"),  # type: ignore[arg-type]
        lambda: Layout(MESH, "[R]", (True,), "f32"),
        lambda: Layout(MESH, "[R]", (10**30,), "f32"),
        lambda: Layout(MESH, "[R]", (10**5000,), "f32"),
        lambda: Layout(MESH, "[R]", (-(10**5000),), "f32"),
        lambda: Layout(MESH, "[R]", (4,), "x" * 1000),
    ],
)
def test_questions_of_odd_types(ask):
    with pytest.raises(ShardSpecError) as caught:
        ask()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_specs_of_more_dims_than_are_planned_for():
    layout = Layout(MESH, ShardingSpec(65, {0: [0]}), (2,) * 60 + (1,) * 5, "f32")
    with pytest.raises(LayoutError, match="for 2 mesh axes and 65 dims"):
        LayoutConverter().plan(layout, ShardingSpec(65))
    wide = Layout(DeviceMesh([0], (1,) * 33), "[S0]", (4,), "f32")
    with pytest.raises(LayoutError, match="at most 32 axes"):
        LayoutConverter().plan(wide, "[R]")


def test_meshes_of_more_devices_than_conversions_between_meshes_are_planned_for():
    large = Layout(DeviceMesh(range(20_000), (20_000,)), "[S0]", (20_000,), "f32")
    small = Layout(DeviceMesh(range(2), (2,)), "[S0]", (20_000,), "f32")
    with pytest.raises(LayoutError, match="20,000 devices is too large"):
        LayoutConverter().plan(large, small)
    a, b = (Layout(DeviceMesh(range(4096), s), "[S01]", (4096,), "f32") for s in [(64,) * 2] * 2)
    assert LayoutConverter().plan(a, b).steps == ()
    rows = Layout(DeviceMesh(range(2048), (2048,)), "[S0]", (2048,), "f32")
    whole = Layout(DeviceMesh(range(2048, 4096), (2, 1024)), "[R]", (2048,), "f32")
    plan = LayoutConverter().plan(rows, whole)
    assert str(plan.target.spec) == "[R]"


def test_what_is_safe_to_print():
    assert printable("plain – text") == "plain – text"
    assert printable("\x1b[2J\u202ea\x9b\ud800\n") == r"\x1b[2J\u202ea\x9b\ud800\n"
    assert printable("a\nb\t", keep="\n") == "a\nb\\t"
    assert shown(10**5000) == "a very large int"
    assert shown([10**5000]) == "a very large list"
