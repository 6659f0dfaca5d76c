"""Gradients through conversions against the gradient of the same program on one tensor."""

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardspec import DeviceMesh, DTensor, ShardingSpec
from shardspec.errors import LayoutError
from shardspec.layout.graph import explore, spec_of

MESH = DeviceMesh([3, 0, 5, 2, 1, 4], (2, 3))
SPECS = sorted((spec_of(state) for state in explore(2, ShardingSpec(2)).nodes), key=str)
WHOLE = (torch.arange(35.0) * 0.37).sin().reshape(7, 5).double()


MESHES = [
    MESH,
    DeviceMesh([1, 0], (1, 2)),
    DeviceMesh([1, 0], (2, 1)),
    DeviceMesh([0], (1, 1)),
    DeviceMesh([3, 0, 5, 2, 1, 4], (1, 3, 2)),
]
EACH_MESH = pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.shape))
SAMPLED = pytest.mark.parametrize(
    "sampled", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["sampled", "all"]
)


def pairs_on(mesh: DeviceMesh, sampled: bool) -> list[tuple[ShardingSpec, ShardingSpec]]:
    """Return pairs of specs, evenly spread: all on two axes and many on three, or fewer."""
    specs = [spec_of(state) for state in explore(mesh.ndim, ShardingSpec(2)).nodes]
    specs.sort(key=str)
    pairs = list(product(specs, specs))
    if mesh.ndim == 2:
        return pairs[:: {1: 7, 2: 5, 6: 3}[mesh.size()] if sampled else 1]
    return pairs[:: 151 if sampled else 7]


AUTOGRAD: Any = torch.autograd  # whose functions are typed for torch's tensors alone


def loss_of(whole: torch.Tensor) -> torch.Tensor:
    return (whole**3 * torch.arange(35).reshape(7, 5)).sum()


(GRADIENT,) = torch.autograd.grad(loss_of(LEAF := WHOLE.clone().requires_grad_()), [LEAF])


@SAMPLED
@EACH_MESH
def test_derivatives_through_pairs_of_specs(mesh, sampled):
    """First and second derivatives; the third of this loss is that of the convention too."""
    weights = torch.arange(35).reshape(7, 5)
    for source, target in pairs_on(mesh, sampled):
        leaf = DTensor(WHOLE.clone().requires_grad_(), mesh, source)
        shards = list(leaf.shards.values())
        loss = loss_of(leaf.redistribute(target).to_global())
        first = torch.autograd.grad(loss, shards, create_graph=True)
        wanted = DTensor(GRADIENT, mesh, source).shards.values()
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


@EACH_MESH
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_second_derivatives_by_differences(mesh, op):
    """Numerical ones, of addends that are all pending and of what is sharded after."""
    axes = "".join(map(str, range(mesh.ndim)))

    def finished(*addends: torch.Tensor) -> torch.Tensor:
        held = dict(zip(mesh.ids, addends, strict=True))
        tensor = DTensor.from_local(held, mesh, f"[R,R|P{op}{axes}]")
        return tensor.redistribute("[S0,R]").redistribute("[R,S0]").to_global().sin()

    def addend(_: int) -> torch.Tensor:
        shape = {(2, 3): (3, 1), (1, 3, 2): (2, 1)}.get(mesh.shape, (3, 2))
        return torch.rand(shape, dtype=torch.float64, generator=generator, requires_grad=True)

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
        wanted = DTensor(GRADIENT * factor, MESH, source)
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
    wanted = DTensor(GRADIENT, MESH, source)
    for device in MESH.ids:
        torch.testing.assert_close(grad.shards[device], wanted.shards[device])


@SAMPLED
@pytest.mark.parametrize("mesh", MESHES[1:], ids=lambda mesh: str(mesh.shape))
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_pending_sources_with_axes_of_one(op, mesh, sampled):
    for source, target in pairs_on(mesh, sampled):
        free = [axis for axis in range(mesh.ndim) if axis not in source.axes]
        spec = ShardingSpec(2, source.dim_partition_dict, partial=dict.fromkeys(free, op))
        count = prod(mesh.shape[axis] for axis in free)
        leaf = DTensor(WHOLE / (count if op == "sum" else 1), mesh, source)
        shards = {d: shard.requires_grad_() for d, shard in leaf.shards.items()}
        t = DTensor.from_local(shards, mesh, spec, global_shape=(7, 5))
        loss_of(t.redistribute(target).to_global()).backward()
        wanted = DTensor(GRADIENT / (count if op == "avg" else 1), mesh, source)
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
    with pytest.raises(LayoutError, match=r"grad_spec \[R,R\|P1\] does not fit \[S0,R\]"):
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
    wanted = DTensor(GRADIENT, MESH, "[S0,R]")
    for device in MESH.ids:
        torch.testing.assert_close(grad.shards[device], wanted.shards[device])


def test_a_tensor_is_what_its_gradient_is_asked_for_and_hooked_at():
    """On a simulated mesh, where several shards make up one tensor."""
    leaf = DTensor(WHOLE.clone().requires_grad_(), MESH, "[S0,S1]")
    middle = leaf.redistribute("[R,S0]")
    middle.retain_grad()
    seen: list[tuple[str, DTensor]] = []
    leaf.register_hook(lambda gradient: seen.append(("leaf", gradient)))
    middle.register_hook(lambda gradient: seen.append(("middle", gradient)))
    done = leaf.register_post_accumulate_grad_hook(lambda tensor: seen.append(("done", tensor)))
    loss = leaf.to_global().square().sum() + middle.to_global().square().sum()
    for found, times in zip(
        AUTOGRAD.grad(loss, [leaf, middle], retain_graph=True), (4, 2), strict=True
    ):
        torch.testing.assert_close(found.to_global(), times * WHOLE)
    assert [name for name, _ in seen] == ["middle", "leaf"]
    loss.backward(inputs=[leaf], retain_graph=True)
    done.remove()
    loss.backward()
    assert [name for name, _ in seen[2:]] == ["middle", "leaf", "done", "middle", "leaf"]
    assert seen[4][1] is leaf
    for name, gradient in seen[:2] + seen[5:]:
        torch.testing.assert_close(gradient.to_global(), {"middle": 2, "leaf": 4}[name] * WHOLE)
    assert leaf.grad is not None
    assert middle.grad is not None
    torch.testing.assert_close(leaf.grad.to_global(), 8 * WHOLE)
    torch.testing.assert_close(middle.grad.to_global(), 6 * WHOLE)  # torch keeps a sum
    leaf.grad = None
    assert leaf.grad is None
    assert [leaf.is_leaf, middle.is_leaf, middle.retains_grad] == [True, False, True]
    assert not middle.detach().requires_grad
    assert middle.requires_grad
    leaf.register_hook(lambda gradient: gradient)
    with pytest.raises(LayoutError, match=r"a hook cannot replace .* 6 shards"):
        leaf.to_global().sum().backward()


def test_what_was_not_used_has_no_gradient_or_zeros():
    used, unused = (DTensor(WHOLE.clone().requires_grad_(), MESH, "[S0,R]") for _ in range(2))
    loss = (used.to_global() ** 2).sum()
    both = [used, unused]
    with pytest.raises(RuntimeError, match="not have been used"):
        AUTOGRAD.grad(loss, both, retain_graph=True)
    (first, nothing) = AUTOGRAD.grad(loss, both, allow_unused=True, retain_graph=True)
    assert nothing is None
    torch.testing.assert_close(first.to_global(), 2 * WHOLE)
    (_, zeros) = AUTOGRAD.grad(loss, both, materialize_grads=True)
    assert not zeros.to_global().any()
    # Devices whose shards were not used have zeros where others have a gradient.
    used.to_local(3).sum().backward()
    assert used.grad is not None
    assert used.grad.to_global().sum(1).tolist() == [5, 5, 5, 5, 0, 0, 0]


def test_a_gradient_starts_from_a_tensor_of_another_layout():
    leaf = DTensor(WHOLE.clone().requires_grad_(), MESH, "[S0,R]")
    moved = leaf.redistribute("[R,S01]")
    start = DTensor(2 * WHOLE, MESH, "[S1,R]")
    moved.backward(start, retain_graph=True)
    AUTOGRAD.backward([moved], [start])
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.to_global(), 4 * WHOLE)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        leaf.redistribute("[R,S0]").backward()
    with pytest.raises(LayoutError, match=r"plain tensor of shape \(7, 5\)"):
        leaf.redistribute("[R,S0]").backward(WHOLE)


@pytest.mark.parametrize("target", ["[S0,R]", "[R,S0]"])
def test_a_conversion_is_a_step_of_its_own_whether_or_not_anything_moves(target):
    leaf = DTensor(WHOLE.clone().requires_grad_(), MESH, "[S0,R]")
    moved = leaf.redistribute(target)
    loss = leaf.to_global().sum() + (3 * moved.to_global()).sum()
    of_leaf, of_moved = AUTOGRAD.grad(loss, [leaf, moved])
    assert (of_leaf.to_global() == 4).all()
    assert (of_moved.to_global() == 3).all()
    with torch.no_grad():
        assert not leaf.redistribute(target).requires_grad


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_the_gradient_of_a_gradient_of_addends(op):
    """The gradient is one tensor, of which every addend's is a copy: (t²)² over the whole t."""
    addends = {d: (WHOLE * (i + 1)).requires_grad_() for i, d in enumerate(MESH.ids)}
    tensor = DTensor.from_local(addends, MESH, f"[R,R|P{op}01]")
    share = 1 / 6 if op == "avg" else 1
    total = 21 * share * WHOLE
    square = total.square().sum()
    loss = tensor.to_global().square().sum() ** 2
    (first,) = AUTOGRAD.grad(loss, tensor, create_graph=True)
    torch.testing.assert_close(first.to_global(), share * 4 * square * total)
    (second,) = AUTOGRAD.grad(first.to_global().square().sum(), tensor)
    torch.testing.assert_close(second.to_global(), share**3 * 96 * square**2 * total)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Any, use: Any = None) -> Any:
        return 2 * tensor if use is None else 2 * use(tensor)

    @staticmethod
    def backward(_: Any, gradient: Any) -> Any:
        return 2 * gradient, None


USES = {
    "sum": lambda t: t.sum(),
    "shard": lambda t: t.to_local(0),
    "global": lambda t: t.to_global(),
    "converted": lambda t: t.redistribute("[R,R]"),
    "part": lambda t: t[0],
    "flag": lambda t: t.requires_grad,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("of", ["a leaf", "a computed tensor"])
def test_an_autograd_function_of_a_dtensor_never_loses_a_gradient_unsaid(use, of):
    apply: Any = _Doubled.apply
    leaf = DTensor(WHOLE.clone().requires_grad_(), MESH, "[S0,R]")
    tensor = leaf if of == "a leaf" else 3 * leaf
    with pytest.raises(LayoutError, match="Function"):
        use(apply(tensor))
    with pytest.raises(LayoutError, match="Function"):
        apply(tensor, lambda t: t.to_global()).sum().backward()
    untracked: Any
    for untracked in (leaf.detach(), DTensor(WHOLE, MESH, "[S0,R]"), tensor.detach()):
        use(apply(untracked))
        assert torch.equal(apply(untracked).to_global(), 2 * untracked.to_global())
    with torch.no_grad():
        use(apply(tensor))
    with pytest.raises(LayoutError, match="use_reentrant=False"):
        checkpoint(lambda t: 2 * t, tensor, use_reentrant=True).sum().backward()
    # Tracked later, or no longer.
    later = DTensor(WHOLE.clone(), MESH, "[S0,R]").requires_grad_()
    with pytest.raises(LayoutError, match="Function"):
        use(apply(later))
    use(apply(later.requires_grad_(False)))
    written = DTensor(WHOLE.clone(), MESH, "[S0,R]")
    written.add_(leaf)
    with pytest.raises(LayoutError, match="Function"):
        use(apply(written))
