"""Gradients through conversions against the gradient of the same program on one tensor."""

from itertools import product
from math import prod

import pytest
import torch

from shardspec import DeviceMesh, DTensor, ShardingSpec
from shardspec.errors import LayoutError
from shardspec.layout.graph import explore, spec_of

MESH = DeviceMesh([3, 0, 5, 2, 1, 4], (2, 3))
SPECS = sorted((spec_of(state) for state in explore(2, ShardingSpec(2)).nodes), key=str)
WHOLE = (torch.arange(35.0) * 0.37).sin().reshape(7, 5).double()


MESHES = [
    (MESH, 121),
    (DeviceMesh([1, 0], (1, 2)), 121),
    (DeviceMesh([1, 0], (2, 1)), 121),
    (DeviceMesh([0], (1, 1)), 121),
    (DeviceMesh([3, 0, 5, 2, 1, 4], (1, 3, 2)), 46),
]


def pairs_on(mesh: DeviceMesh) -> list[tuple[ShardingSpec, ShardingSpec]]:
    """Return all pairs of specs on a mesh of two axes, and every 53rd or so on one of three."""
    specs = [spec_of(state) for state in explore(mesh.ndim, ShardingSpec(2)).nodes]
    specs.sort(key=str)
    pairs = list(product(specs, specs))
    return pairs if mesh.ndim < 3 else pairs[::53]


def loss_of(whole: torch.Tensor) -> torch.Tensor:
    return (whole**3 * torch.arange(35).reshape(7, 5)).sum()


def expected_gradient() -> torch.Tensor:
    whole = WHOLE.clone().requires_grad_()
    loss_of(whole).backward()
    assert whole.grad is not None
    return whole.grad


@pytest.mark.parametrize(("mesh", "pairs"), MESHES, ids=str)
def test_every_pair(mesh, pairs):
    """First and second derivatives; the third of this loss is that of the convention too."""
    weights = torch.arange(35).reshape(7, 5)
    tried = pairs_on(mesh)
    assert len(tried) == pairs
    for source, target in tried:
        leaf = DTensor(WHOLE.clone().requires_grad_(), mesh, source)
        shards = list(leaf.shards.values())
        loss = loss_of(leaf.redistribute(target).to_global())
        first = torch.autograd.grad(loss, shards, create_graph=True)
        wanted = DTensor(expected_gradient(), mesh, source).shards.values()
        for found, expected in zip(first, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        # Another path leads to the leaf: 3x²w + x², of which the gradient is 6xw + 2x.
        gradient = DTensor.from_local(dict(zip(mesh.ids, first, strict=True)), mesh, source)
        again = gradient.redistribute(target).to_global().sum()
        again = again + (leaf.redistribute(target).to_global() ** 2).sum()
        second = torch.autograd.grad(again, shards, create_graph=True)
        wanted = DTensor(6 * WHOLE * weights + 2 * WHOLE, mesh, source).shards.values()
        for found, expected in zip(second, wanted, strict=True):
            torch.testing.assert_close(found, expected)
        gradient = DTensor.from_local(dict(zip(mesh.ids, second, strict=True)), mesh, source)
        third = torch.autograd.grad(gradient.to_global().sum(), shards)
        wanted = DTensor((6 * weights + 2).double(), mesh, source).shards.values()
        for found, expected in zip(third, wanted, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("mesh", "_"), MESHES, ids=str)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_second_derivatives_by_differences(mesh, _, op):
    """Numerical ones, of addends that are all pending and of what is sharded after."""
    axes = "".join(map(str, range(mesh.ndim)))

    def finished(*addends: torch.Tensor) -> torch.Tensor:
        held = dict(zip(mesh.ids, addends, strict=True))
        tensor = DTensor.from_local(held, mesh, f"[R,R|P{op}{axes}]")
        return tensor.redistribute("[S0,R]").redistribute("[R,S0]").to_global().sin()

    def addend(_: int) -> torch.Tensor:
        return torch.rand(3, 2, dtype=torch.float64, generator=generator, requires_grad=True)

    generator = torch.Generator().manual_seed(5)
    addends = tuple(map(addend, mesh.ids))
    assert torch.autograd.gradcheck(finished, addends)
    assert torch.autograd.gradgradcheck(finished, addends)


@pytest.mark.parametrize("mean", [False, True])
def test_second_derivatives_through_a_grad_spec(mean):
    """Every device takes its part of the loss from its copy, and parts add up to a whole."""
    leaf = DTensor(WHOLE.clone().requires_grad_(), MESH, "[S0,R]")
    shards = list(leaf.shards.values())
    total = torch.zeros((), dtype=torch.float64)
    for i, device in enumerate(MESH.ids):
        local = leaf.to_local(device, grad_spec=f"[S0,R|P{'avg' if mean else ''}1]")
        share = 1 / 3 if not mean else [1, 2, 0][i % 3]
        total = total + (local**3).sum() * share
    first = torch.autograd.grad(total, shards, create_graph=True)
    gradient = DTensor.from_local(dict(zip(MESH.ids, first, strict=True)), MESH, "[S0,R]")
    torch.testing.assert_close(gradient.to_global(), 3 * WHOLE**2)
    second = torch.autograd.grad((gradient.to_global() ** 2).sum() / 2, shards)
    # 3x² times 6x, of which each copy's part arrives, to be added up by the caller.
    parts = DTensor.from_local(dict(zip(MESH.ids, second, strict=True)), MESH, "[S0,R]")
    torch.testing.assert_close(parts.to_global(), 18 * WHOLE**3)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("pending", [(0,), (1,), (0, 1)], ids=str)
def test_every_pair_with_a_pending_source(op, pending):
    count = prod(MESH.shape[axis] for axis in pending)
    sources = [s for s in SPECS if not set(s.axes) & set(pending)]
    scale = count if op == "sum" else 1
    for source, target in product(sources, SPECS):
        leaf = DTensor(WHOLE / scale, MESH, source)  # equal addends that make up WHOLE
        shards = {d: shard.requires_grad_() for d, shard in leaf.shards.items()}
        spec = ShardingSpec(2, source.dim_partition_dict, partial=dict.fromkeys(pending, op))
        t = DTensor.from_local(shards, MESH, spec, global_shape=(7, 5))
        loss_of(t.redistribute(target).to_global()).backward()
        factor = 1 / count if op == "avg" else 1.0
        wanted = DTensor(expected_gradient() * factor, MESH, source)
        for device in MESH.ids:
            torch.testing.assert_close(shards[device].grad, wanted.shards[device])


@pytest.mark.parametrize("source", SPECS, ids=str)
@pytest.mark.parametrize("target", SPECS, ids=str)
def test_a_loss_in_parts_by_grad_spec(source, target):
    """Each device takes its part of the loss from its shard; copies of a box share it by a sum."""
    leaf = DTensor(WHOLE.clone().requires_grad_(), MESH, source)
    end = leaf.redistribute(target)
    unused = [axis for axis in range(2) if axis not in target.axes]
    copies = prod(MESH.shape[axis] for axis in unused)
    grad_spec = ShardingSpec(2, target.dim_partition_dict, partial=dict.fromkeys(unused, "sum"))
    total = torch.zeros((), dtype=torch.float64)
    weights = DTensor(torch.arange(35).reshape(7, 5), MESH, target)
    for device in MESH.ids:
        local = end.to_local(device, grad_spec=grad_spec)
        total = total + (local**3 * weights.to_local(device)).sum() / copies
    total.backward()
    grad = leaf.grad
    assert grad is not None
    wanted = DTensor(expected_gradient(), MESH, source)
    for device in MESH.ids:
        torch.testing.assert_close(grad.shards[device], wanted.shards[device])


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_axes_of_one(op, sizes):
    mesh = DeviceMesh(range(prod(sizes)), sizes)
    specs = [spec_of(s) for s in explore(mesh.ndim, ShardingSpec(2)).nodes]
    for source, target in list(product(specs, specs))[:: 1 if mesh.ndim == 2 else 17]:
        free = [axis for axis in range(mesh.ndim) if axis not in source.axes]
        spec = ShardingSpec(2, source.dim_partition_dict, partial=dict.fromkeys(free, op))
        count = prod(mesh.shape[axis] for axis in free)
        leaf = DTensor(WHOLE / (count if op == "sum" else 1), mesh, source)
        shards = {d: shard.requires_grad_() for d, shard in leaf.shards.items()}
        t = DTensor.from_local(shards, mesh, spec, global_shape=(7, 5))
        loss_of(t.redistribute(target).to_global()).backward()
        wanted = DTensor(expected_gradient() / (count if op == "avg" else 1), mesh, source)
        for device in mesh.ids:
            torch.testing.assert_close(shards[device].grad, wanted.shards[device])


@pytest.mark.parametrize("op", ["min", "max", "prod"])
def test_reductions_without_a_gradient_are_refused(op):
    shards = {d: torch.ones(4, requires_grad=True) for d in MESH.ids}
    t = DTensor.from_local(shards, MESH, f"[R|P{op}0]")
    with pytest.raises(LayoutError, match=f"no gradient is defined for the pending {op}"):
        t.redistribute("[R]")
    with torch.no_grad():
        assert t.redistribute("[S0]").to_local(3).tolist() == [1.0, 1.0]


def test_grad_spec_that_does_not_fit():
    t = DTensor(WHOLE, MESH, "[S0,R]")
    with pytest.raises(LayoutError, match="keep its dims"):
        t.to_local(3, grad_spec="[R,R|P1]")
    with pytest.raises(LayoutError, match="sums or means"):
        t.to_local(3, grad_spec="[S0,R|Pmax1]")


def test_no_gradient_yet():
    assert DTensor(WHOLE, MESH, "[S0,R]").grad is None


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_the_gradient_of_addends_is_a_dtensor_with_nothing_pending(op):
    """Also where the reduction is finished in two conversions."""
    addends = {d: (WHOLE * (i + 1)).requires_grad_() for i, d in enumerate(MESH.ids)}
    t = DTensor.from_local(addends, MESH, f"[R,R|P{op}01]")
    total = 21 / (6 if op == "avg" else 1) * WHOLE
    half = t.redistribute(f"[R,S1|P{op}0]")
    assert half.requires_grad
    whole = half.redistribute("[S0,R]").to_global()
    torch.testing.assert_close(whole, total)
    loss_of(whole).backward()
    grad = t.grad
    assert grad is not None
    assert str(grad.sharding_spec) == "[R,R]"
    wanted = 3 * total**2 * torch.arange(35).reshape(7, 5) / (6 if op == "avg" else 1)
    for device in MESH.ids:
        torch.testing.assert_close(grad.shards[device], wanted)


def test_a_gradient_may_arrive_as_a_mean():
    """Each of the devices along an axis gives the whole gradient, and their mean is taken."""
    leaf = DTensor(WHOLE.clone().requires_grad_(), MESH, "[S0,R]")
    total = torch.zeros((), dtype=torch.float64)
    weights = DTensor(torch.arange(35).reshape(7, 5), MESH, "[S0,R]")
    for i, device in enumerate(MESH.ids):
        local = leaf.to_local(device, grad_spec="[S0,R|Pavg1]")
        total = total + (local**3 * weights.to_local(device)).sum() * [1, 2, 0][i % 3]
    total.backward()
    grad = leaf.grad
    assert grad is not None
    wanted = DTensor(expected_gradient(), MESH, "[S0,R]")
    for device in MESH.ids:
        torch.testing.assert_close(grad.shards[device], wanted.shards[device])
