"""One mesh stands for several of the same devices: every device holds what it held."""

from itertools import product

from shardspec import DeviceMesh, Layout
from shardspec.layout.common_mesh import on_common_mesh

SHAPES = [(2, 2), (4,), (1, 4), (2, 1, 2), (4, 1)]


def test_every_device_holds_the_same_on_the_common_mesh():
    for (one, other), size in product(product(SHAPES, SHAPES), (4, 7, 8)):
        layouts = {}
        for name, shape in {"a": one, "b": other}.items():
            mesh = DeviceMesh(
                [3, 1, 0, 2], shape, axis_names=[f"{name}{n}" for n in range(len(shape))]
            )
            for axes in ("R", "S0", f"S{len(shape) - 1}", f"S0{len(shape) - 1 or ''}"):
                if len(shape) == 1 and axes == "S00":
                    continue
                layouts[f"{name}{axes}"] = Layout(mesh, f"[{axes},R]", (size, 3), "int8")
        mesh, found = on_common_mesh(layouts)
        assert mesh.ids == (3, 1, 0, 2)
        for name, layout in layouts.items():
            for device in mesh.ids:
                assert found[name].local_boxes(device) == layout.local_boxes(device)
        even = size % 4 == 0
        assert all(layout.mesh == mesh for layout in found.values()) or not even


def test_axes_are_called_what_they_are_in_both_meshes():
    dense = DeviceMesh(range(8), (4, 2), axis_names=("dp", "tp"))
    experts = DeviceMesh(range(8), (2, 4), axis_names=("edp", "ep"))
    layouts = {
        "w": Layout(dense, "[S(tp){8,4},R]", (12, 2), "int8"),
        "e": Layout(experts, "[S(ep),R]", (8, 2), "int8"),
    }
    mesh, found = on_common_mesh(layouts)
    assert mesh.shape == (2, 2, 2)
    assert mesh.axis_names == ("dp_edp", "dp_ep", "tp_ep")
    assert str(found["w"].labelled_spec) == "[S(tp_ep){8,4},R]"
    assert str(found["e"].labelled_spec) == "[S(dp_ep,tp_ep),R]"


def test_meshes_that_no_mesh_stands_for_are_kept():
    threes = DeviceMesh(range(6), (2, 3), axis_names=("dp", "tp"))
    twos = DeviceMesh(range(6), (3, 2), axis_names=("dp", "tp"))
    some = DeviceMesh([1, 2], axis_names=("tp",))
    for one, other in ((threes, twos), (threes, some)):
        layouts = {n: Layout(m, "[S(tp)]", (6,), "int8") for n, m in (("a", one), ("b", other))}
        mesh, found = on_common_mesh(layouts)
        assert found == layouts
        assert set(mesh.ids) == {*one.ids, *other.ids}
