"""What autograd and the compiler make of a tensor in operators and conversions."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.utils.checkpoint import checkpoint

from shardspec import DeviceMesh, DTensor, ones, redistribute
from shardspec.errors import LayoutError

AUTOGRAD: Any = torch.autograd  # whose functions are typed for torch's tensors alone
WHOLE = (torch.arange(15.0) * 0.37).sin().reshape(5, 3).double()
SPECS = ("[S0,R]", "[R,S1]", "[S1,S0]", "[R,R]")
CHANGED = "modified by an inplace operation"
Pair = tuple[torch.Tensor, Any]
"""A tensor of one process, and the same on a mesh."""


def leaf_on(mesh: DeviceMesh, spec: str = "[S0,R]") -> Any:
    return DTensor(WHOLE.clone().requires_grad_(), mesh, spec)


def one_node(_, mesh):
    for spec in SPECS[::2]:
        leaf = leaf_on(mesh, spec)
        seen: list[torch.Tensor] = []
        loss = (leaf * leaf).sum() + leaf.redistribute("[R,R]").square().sum()
        loss = loss + leaf.to_global().square().sum()  # a plain number
        (found,) = AUTOGRAD.grad(loss, leaf, retain_graph=True)
        torch.testing.assert_close(found.to_global(), 6 * WHOLE)
        hooked: Any = leaf
        hooked.register_hook(lambda gradient, seen=seen: seen.append(gradient.to_global()))
        done = hooked.register_post_accumulate_grad_hook(
            lambda tensor, seen=seen: seen.append(tensor.grad.to_global())
        )
        loss.backward(inputs=[leaf], retain_graph=True)
        torch.testing.assert_close(torch.stack(seen), torch.stack([6 * WHOLE] * 2))
        done.remove()
        leaf.register_hook(lambda gradient: gradient / 2)
        loss.backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.to_global(), 9 * WHOLE)
    # Where torch's code waits for gradients of several tensors.
    both, seen = [leaf_on(mesh), leaf_on(mesh, "[R,S0]")], []
    waiting = AUTOGRAD.graph.register_multi_grad_hook(both, seen.extend)
    torch.stack([each.redistribute("[R,R]").to_global().sum() for each in both]).sum().backward()
    assert len(seen) == 2
    waiting.remove()
    edge = AUTOGRAD.graph.get_gradient_edge(both[0])
    loss = both[0].to_global().sum() + (both[0] * 2).sum().to_global()
    (gradient,) = AUTOGRAD.grad(loss, edge)
    assert (gradient == 3).all()
    # Tensors on two meshes.
    line = leaf_on(DeviceMesh(range(4), (4,)))
    other = leaf_on(mesh)
    loss = (line * line).sum().to_global() + (other * other * 2).sum().to_global()
    for found, times in zip(AUTOGRAD.grad(loss, [line, other]), (2, 4), strict=True):
        torch.testing.assert_close(found.to_global(), times * WHOLE)
    # A number of one process gets one as its gradient.
    factor = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    (leaf_on(mesh) * factor).sum().backward()
    assert type(factor.grad) is torch.Tensor
    torch.testing.assert_close(factor.grad, WHOLE.sum())


def toggles_and_leaves(_, mesh):
    leaf = leaf_on(mesh)
    assert (leaf * 2).requires_grad
    leaf.to_local().requires_grad_(False)
    assert not (leaf * 2).requires_grad
    leaf.requires_grad = True
    assert (leaf * 2).requires_grad
    with torch.inference_mode():
        assert not (leaf * 2).requires_grad
    (leaf * leaf).sum().backward()
    assert leaf.grad is not None
    writes: list[Callable[[], object]] = [
        lambda: leaf.mul_(2),
        lambda: leaf[:, 1].mul_(2),
        lambda: leaf.t().add_(1),
        lambda: leaf.view_as(leaf).add_(1),
        lambda: leaf.redistribute("[S0,R]").add_(1),
    ]
    for write in writes:
        with pytest.raises(LayoutError, match=r"would write to a (leaf|part)"):
            write()
    assert torch.equal(leaf.to_global(), WHOLE)
    # The shard itself gets a history.
    moved = leaf_on(mesh).redistribute("[R,S1]")
    assert (moved + 0).requires_grad
    moved.to_local().mul_(3)
    (found,) = AUTOGRAD.grad((moved.detach() * moved).sum(), moved)
    torch.testing.assert_close(found.to_global(), 3 * WHOLE)
    moved.detach_()
    assert [moved.is_leaf, moved.requires_grad, (moved * 2).requires_grad] == [True, False, False]


def writes_are_seen_by_a_backward(_, mesh):
    """Through whichever of the tensors that share storage it is written."""
    plain = DTensor(WHOLE, mesh, "[S0,R]")
    product: Any = DTensor(WHOLE, mesh, "[S0,R]") * 1
    theirs = torch_distribute(WHOLE, mesh.to_torch(), [Shard(0), Replicate()])
    writes: list[tuple[Any, Callable[[], object]]] = [
        (plain, lambda: plain.to_local().mul_(2)),
        (plain, lambda: plain.redistribute("[S0,R]").mul_(2)),
        (plain, lambda: plain.detach().zero_()),
        (product, lambda: product.to_local().mul_(2)),
        (product, lambda: product.redistribute("[S0,R]").mul_(2)),
        (product, lambda: DTensor.from_torch(product.to_torch()).mul_(2)),
        (theirs, lambda: redistribute(theirs, [Shard(0), Replicate()]).mul_(2)),
        (theirs, lambda: DTensor.from_torch(theirs).to_local().mul_(2)),
    ]
    for factor, write in writes:
        leaf = leaf_on(mesh)
        loss = ((leaf.to_torch() if factor is theirs else leaf) * factor).sum()
        write()
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def second_derivatives(_, mesh):
    """The gradient of a factor that is whole everywhere arrives in parts."""
    square = WHOLE.square().sum()
    for spec in SPECS[::2]:
        leaf, part = leaf_on(mesh, spec), DTensor(WHOLE, mesh, "[S0,R]")
        whole = leaf.redistribute("[R,R]")
        (first,) = AUTOGRAD.grad((whole**3 * part).sum(), leaf, create_graph=True)
        torch.testing.assert_close(first.to_global(), 3 * WHOLE**3)
        (second,) = AUTOGRAD.grad((first * first).sum(), leaf)
        torch.testing.assert_close(second.to_global(), 36 * WHOLE**5)
        total = (leaf * leaf).sum()  # pending
        loss = (total * total).to_global() + total.to_global() ** 2
        (first,) = AUTOGRAD.grad(loss, leaf, create_graph=True)
        torch.testing.assert_close(first.to_global(), 8 * square * WHOLE)
        (second,) = AUTOGRAD.grad(first.to_global().square().sum(), leaf)
        torch.testing.assert_close(second.to_global(), 384 * square**2 * WHOLE)
    leaf = leaf_on(mesh)

    def again(tensor: Any) -> Any:
        return (tensor.redistribute("[R,S0]").exp() * tensor).sum().to_global()

    checked: Any = checkpoint(again, leaf, use_reentrant=False)
    checked.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.to_global(), (WHOLE + 1) * WHOLE.exp())


def random_graphs(seeds, mesh):
    """The same program on one process: gradients, hooks, refusals, gradients of gradients."""
    for seed in seeds:
        random_graph(random.Random(seed), mesh)


def random_graph(draw: random.Random, mesh: DeviceMesh) -> None:
    pairs: list[Pair] = []
    for start in (WHOLE, WHOLE + 1):
        whole = start.clone().requires_grad_()
        pairs.append((whole, DTensor(whole.detach().clone().requires_grad_(), mesh, SPECS[0])))
    leaves = list(pairs)
    for _ in range(draw.randint(4, 8)):
        kind, pair, other = draw.choice(STEPS), draw.choice(pairs), draw.choice(pairs)
        pairs += filter(None, [kind(draw, pair, other)])
    want: list[torch.Tensor] = []
    got: list[torch.Tensor] = []
    pairs = [pair for pair in pairs if pair[0].requires_grad]
    for whole, cut in pairs:
        whole.register_hook(lambda gradient: want.append(gradient.detach().sum()))
        cut.register_hook(lambda gradient: got.append(gradient.detach().to_global().sum()))
    zero = torch.zeros((), dtype=torch.float64)
    losses = [zero, zero]
    for whole, cut in draw.choices(pairs, k=3):
        losses[0] = losses[0] + whole.cos().sum()
        losses[1] = losses[1] + draw.choice(LOSSES)(cut)
    expected, found = (
        gradients(loss, list(tensors))
        for loss, tensors in zip(losses, zip(*pairs, strict=True), strict=True)
    )
    assert (expected is None) == (found is None)
    if expected is None or found is None:
        return
    check_equal(expected, found)
    torch.testing.assert_close(torch.stack(got).sort().values, torch.stack(want).sort().values)
    again = [sum(each.square().sum() for each in expected if each is not None)]
    again += [sum(each.to_global().square().sum() for each in found if each is not None)]
    second = [
        gradients(loss, list(tensors))
        for loss, tensors in zip(again, zip(*leaves, strict=True), strict=True)
    ]
    check_equal(*second)


def gradients(loss: Any, tensors: list[Any]) -> list[Any] | None:
    if not loss.requires_grad:
        return [None] * len(tensors)
    try:
        return [*AUTOGRAD.grad(loss, tensors, allow_unused=True, create_graph=True)]
    except RuntimeError as error:
        if CHANGED not in str(error):
            raise
        return None


def check_equal(expected: list[Any] | None, found: list[Any] | None) -> None:
    assert expected is not None
    assert found is not None
    for whole, cut in zip(expected, found, strict=True):
        assert (whole is None) == (cut is None)
        if whole is not None:
            torch.testing.assert_close(cut.to_global(), whole)


LOSSES: list[Callable[[Any], Any]] = [
    lambda cut: cut.cos().sum().to_global(),
    lambda cut: cut.to_global().cos().sum(),
    lambda cut: cut.redistribute("[S1,S0]").cos().sum().to_global(),
]


def moved(draw: random.Random, pair: Pair, _: Pair) -> Pair:
    elsewhere = [spec for spec in SPECS if spec != str(pair[1].sharding_spec)]
    return pair[0] * 1, pair[1].redistribute(draw.choice(elsewhere))


def in_place(_: random.Random, pair: Pair, __: Pair) -> None:
    if not pair[0].is_leaf and pair[0]._base is None:
        for tensor in pair:
            tensor.mul_(1.5)


def untracked(_: random.Random, pair: Pair, __: Pair) -> Pair:
    with torch.no_grad():
        there = pair[1].redistribute("[R,S1]")
    return pair[0] + pair[0].detach(), pair[1] + there


STEPS: list[Callable[[random.Random, Pair, Pair], Pair | None]] = [
    moved,
    in_place,
    untracked,
    lambda _, pair, __: (pair[0].view_as(pair[0]), pair[1].redistribute(pair[1].sharding_spec)),
    lambda _, pair, __: (pair[0].view_as(pair[0]), pair[1].view_as(pair[1])),
    lambda _, pair, other: (pair[0] * other[0], pair[1] * other[1]),
    lambda _, pair, other: (pair[0] + 2 * other[0], pair[1] + 2 * other[1]),
    lambda _, pair, __: (pair[0] * pair[0].detach(), pair[1] * pair[1].detach()),
    lambda _, pair, __: (pair[0].t().t() * 2, pair[1].t().t() * 2),
    lambda _, pair, __: (
        pair[0] * 1,
        DTensor.from_local(
            pair[1].to_local() * 1,
            pair[1].device_mesh,
            pair[1].sharding_spec,
            global_shape=pair[0].shape,
        ),
    ),
]


def compiled(_, mesh):
    """The compiler leaves conversions and operators alone, or refuses them, on all ranks alike."""

    def converted(tensor: DTensor) -> Any:
        return (tensor.redistribute("[R,S1]") * 2 + torch.exp(tensor * 0)) - 1

    def made(tensor: DTensor) -> Any:
        one = ones(5, 3, device_mesh=mesh, sharding_spec="[S1,R]", dtype=torch.float64)
        again = DTensor.from_local(tensor.to_local(), mesh, "[S0,R]", global_shape=(5, 3))
        return (again.to_global() * 2) * one.to_global()

    def theirs(tensor: DTensor) -> Any:
        return redistribute(tensor.to_torch(), [Replicate(), Replicate()]).to_local() * 2

    for function in (converted, made, theirs):
        torch.compiler.reset()
        call = torch.compile(function, backend="eager")
        leaf = leaf_on(mesh)
        result: Any = call(leaf)
        whole = result.to_global() if isinstance(result, DTensor) else result
        torch.testing.assert_close(whole, 2 * WHOLE)
        whole.sum().backward()
        assert leaf.grad is not None
        assert (leaf.grad.to_global() == 2).all()
        torch.compiler.reset()
        with pytest.raises(Exception, match=r"shardspec moves shards .* outside of graphs"):
            torch.compile(function, backend="eager", fullgraph=True)(leaf)
    torch.compiler.reset()


SCENES = (
    one_node,
    toggles_and_leaves,
    writes_are_seen_by_a_backward,
    second_derivatives,
    compiled,
)
