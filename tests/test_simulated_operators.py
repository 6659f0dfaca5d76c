"""torch's operators where one process holds the shards of all devices, beside whole tensors."""

import threading
from itertools import permutations, product
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardspec import DeviceMesh, DTensor, ShardSpecError
from shardspec.errors import LayoutError, MeshError
from tests.conversions import index_of
from tests.simulated_tensors import all_specs, check
from tests.simulated_tensors import cut as cut_as_it_is

# The stubs of torch take nothing but its own tensors.
Cut: Any = DTensor
MESHES = {
    shape: DeviceMesh(range(shape[0] * shape[1]), shape) for shape in ((2, 2), (2, 3), (1, 2))
}
WHOLE = (torch.arange(35.0).reshape(7, 5) * 0.37).sin().double()
FUNCTIONS: dict[str, Any] = {
    "exp": torch.exp,
    "add": lambda a: a + 2 * a - 1,
    "mul": lambda a: a * a / 3,
    "where": lambda a: torch.where(a > 0, a, 0.5 * a),
    "matmul": lambda a: a @ a.T,
    "linear": lambda a: F.linear(a, a[:2]),
    "sum": lambda a: a.sum(),
    "sum of a dim": lambda a: a.sum(1, keepdim=True),
    "mean": lambda a: a.mean(),
    "mean of a dim": lambda a: a.mean(0),
    "transpose": lambda a: a.transpose(0, 1),
    "view": lambda a: a.view(7, 1, 5),
    "flatten": lambda a: a.flatten(),
    "softmax": lambda a: a.softmax(0),
    "amax": lambda a: a.amax(0),
    "mean of a loss": lambda a: F.l1_loss(a, 2 * a.detach()),
}
REFUSED = {"flatten": 12, "view": 1, "matmul": 1, "linear": 1}
"""Operations that torch refuses on some layouts."""


def cut(whole: torch.Tensor, mesh: DeviceMesh, spec: str) -> Any:
    """Cut a tensor that wants a gradient."""
    return cut_as_it_is(whole.clone().requires_grad_(), mesh, spec)


def tried(name: str, mesh: DeviceMesh, spec: str) -> str:
    return check(FUNCTIONS[name], [WHOLE.clone().requires_grad_()], mesh, [spec])


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.exhaustive
def test_every_spec_gives_what_one_process_gives(name, shape):
    specs = all_specs(2)
    assert len(specs) == len(set(specs)) == 18
    refusals = [tried(name, MESHES[shape], spec) for spec in specs]
    assert all("redistribute" in why and "\n" not in why for why in refusals if why)
    assert len([why for why in refusals if why]) <= REFUSED.get(name, 0), refusals


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_give_what_one_process_gives(name):
    """The specs that differ most; the others are exhausted elsewhere."""
    for shape, spec in (((2, 3), "[S01,R]"), ((2, 2), "[R,S1|P0]")):
        why = tried(name, MESHES[shape], spec)
        assert not why or (name == "flatten" and "redistribute" in why), (spec, why)


def test_second_derivatives():
    ours, whole = cut(WHOLE, MESHES[2, 2], "[S0,S1]"), WHOLE.clone().requires_grad_()
    grads: list[Any] = []
    for tensor in (ours, whole):
        loss: Any = (tensor * tensor * tensor).sum()
        (first,) = torch.autograd.grad(loss, [tensor], create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), [tensor])
        grads.append(second)
    torch.testing.assert_close(grads[0].to_global(), grads[1])
    torch.testing.assert_close(grads[1], 36 * WHOLE**3)


def test_numbers_are_those_of_the_whole():
    tensor = Cut(WHOLE, MESHES[2, 3], "[S0,S1]")
    assert tensor.sum().item() == pytest.approx(WHOLE.sum().item())
    assert float(tensor.max()) == WHOLE.max().item()
    assert bool((tensor == tensor).all())
    assert torch.equal(tensor, tensor)
    assert not torch.equal(tensor, tensor + 1)
    assert len(tensor.split(3)) == 3
    pending = DTensor.from_local(dict.fromkeys(range(6), WHOLE), MESHES[2, 3], "[R,R|P1]")
    assert (pending + 1).to_global().tolist() == (3 * WHOLE + 1).tolist()
    assert (pending + torch.tensor(1.0).double()).to_global().tolist() == (3 * WHOLE + 1).tolist()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (tensor * scale).sum().to_global().backward()
    torch.testing.assert_close(scale.grad, WHOLE.sum())


def test_views_of_the_shape_of_a_tensor_with_dims_or_without():
    mesh = MESHES[2, 2]
    total = Cut(WHOLE, mesh, "[S01,R]").sum()
    number = Cut(torch.tensor(1.0), mesh, "[]")
    for like in (number, torch.tensor(1.0)):
        assert total.view_as(like).shape == ()
        assert total.view_as(like).to_global().item() == pytest.approx(WHOLE.sum().item())
    three = Cut(torch.zeros(5, 1, 7), mesh, "[R,R,R]")
    assert torch.equal(Cut(WHOLE, mesh, "[R,R]").view_as(three).to_global(), WHOLE.view(5, 1, 7))


def test_writes_reach_the_shards():
    mesh = MESHES[2, 3]
    for spec in ("[R,R]", "[S01,R]"):
        tensor, whole = Cut(WHOLE, mesh, spec), WHOLE.clone()
        places = {device: shard.data_ptr() for device, shard in tensor.shards.items()}
        for each in (tensor, whole):
            each += 1
            each[1, 2] = 9
            each[3] = 4
            each[:, 1] = torch.tensor(5)
            each[each > 0.5] = 0
            each[[0, 6]] = 2
            each.view(7, 5).mul_(2)
            torch.mul(each, 3, out=each)
        assert torch.equal(tensor.to_global(), whole)
        assert {device: shard.data_ptr() for device, shard in tensor.shards.items()} == places
    shares = {device: WHOLE.clone() for device in range(6)}
    pending = DTensor.from_local(shares, mesh, "[R,R|P0]")
    pending.fill_(4)
    assert pending.to_global().tolist() == torch.full((7, 5), 4.0).tolist()


def test_earlier_calls_are_told_apart_by_all_that_decides_what_torch_does():
    """A call that was right is not watched again; one that is written otherwise is."""
    mesh, mask = DeviceMesh(range(2)), [True, False, True]
    keys: list[Any] = [[0, 2], (0, 2), mask, [1, 0, 1], (slice(0, 2), 1), 1]
    for number, pair in enumerate(permutations(keys, 2)):
        spec = ("[R,S0]", "[S0,R]")[number % 2]
        for key in pair:
            # Of a size without earlier calls.
            whole = torch.zeros(3, 20 + number)
            tensor = Cut(whole, mesh, spec)
            tensor[key] = whole[key] = 9.0
            assert torch.equal(tensor.to_global(), whole), (pair, spec)
    few = torch.tensor([3.0, -4.0])
    for order in (2.0, inf, 1.0, -1.0, -inf, 0.5):
        tensor = Cut(few, DeviceMesh(range(3)), "[S0]")
        for norm in (torch.linalg.vector_norm(tensor, order), torch.norm(tensor, p=order)):
            torch.testing.assert_close(norm.to_global(), torch.linalg.vector_norm(few, order))


WRITES: list[Any] = [
    lambda t: t.mul_(3),
    lambda t: t.__setitem__(1, 5.0),
    lambda t: t.__setitem__(t > 0, 5.0),
    lambda t: t.view(35)[3:].zero_(),
    lambda t: t.detach().t().add_(1),
    lambda t: t.split(2)[0].fill_(3),
    lambda t: torch.add(t, 1, out=t),
    lambda t: F.relu(t, inplace=True),
    lambda t: torch._foreach_mul_([t], 2.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_backward_that_needs_old_values_is_refused(write):
    mesh, number = MESHES[2, 2], torch.ones(7, 5).double().requires_grad_()
    tensor = Cut(WHOLE.clone(), mesh, "[R,R]")
    leaf = Cut(WHOLE.clone().requires_grad_(), mesh, "[R,R]")
    tensor.view(35)[1:] + 1  # reads alone
    (leaf * tensor).sum().to_global().backward()
    losses = [(leaf * tensor).sum().to_global()]
    losses += [(number * shard).sum() for shard in tensor.shards.values()]
    write(tensor)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_backward_sees_writes_to_views_of_tracked_tensors():
    leaf, other = (Cut(WHOLE.clone().requires_grad_(), MESHES[2, 2], "[S0,R]") for _ in range(2))
    loss = (leaf * other).sum().to_global()
    leaf.t().detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


dropout: Any = F.dropout


def test_replicas_draw_the_same_numbers():
    mesh = MESHES[2, 3]
    for spec in ("[S0,R]", "[R,R]"):
        torch.manual_seed(5)
        ones = Cut(torch.ones(8, 6), mesh, spec)
        kept, after = dropout(ones), torch.rand(2)
        torch.manual_seed(5)
        assert torch.equal(dropout(ones).to_global(), kept.to_global())
        assert torch.equal(torch.rand(2), after)
        assert 0 < kept.to_global().count_nonzero() < 48
        for device, shard in kept.shards.items():
            assert torch.equal(shard, kept.to_global()[index_of(kept.layout, device)])
    # The numbers of the gradient are those of the value.
    tensor = cut(WHOLE.abs() + 1, mesh, "[S0,R]")
    dropped = dropout(tensor)
    dropped.sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad.to_global() != 0, dropped.to_global() != 0)


def test_extrema_where_any_device_has_nothing():
    meshes = MESHES[2, 3], DeviceMesh(range(6), (3, 2))
    cases = list(product(range(1, 8), meshes, ("[S01,R]", "[S0,S1]")))
    for length, mesh, spec in cases[::3]:
        whole = WHOLE[:length]
        tensor = Cut(whole, mesh, spec)
        assert tensor.amax(0).to_global().tolist() == whole.amax(0).tolist()
        assert tensor.argmin(0).to_global().tolist() == whole.argmin(0).tolist()


def test_what_is_refused_in_a_job_is_refused():
    mesh = MESHES[2, 2]
    tensor = cut(WHOLE, mesh, "[S0,R]")
    refusals: list[tuple[Any, str]] = [
        (lambda: tensor.add_(1), "would write to a leaf"),
        (
            lambda: (tensor * 1).mul_(2),
            "write in place where gradients are tracked, which needs one",
        ),
        (lambda: F.relu(tensor * 1, inplace=True), "relu would write in place"),
        (lambda: tensor + torch.ones(7, 5), "a plain tensor of shape"),
        (lambda: torch.tensor(1.0).add_(tensor.detach().sum()), "would write a DTensor to a plain"),
        (lambda: tensor + Cut(WHOLE, MESHES[2, 3], "[S0,R]"), "another on mesh 2x3"),
        (lambda: tensor.view(35), "Cannot flatten unevenly sharded tensor"),
        (lambda: torch.cdist(tensor, tensor), "do it on to_global()"),
        (lambda: tensor.amax(), "computes a wrong gradient"),
        (lambda: tensor.detach()[:2].zero_(), "gathered into a copy"),
        (lambda: torch.eye(4, 4, out=Cut(torch.ones(4, 4), mesh, "[S0,R]")), "out="),
    ]
    for call, words in refusals:
        with pytest.raises(LayoutError) as caught:
            call()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(MeshError, match="numbers the ranks of a group upwards"):
        Cut(WHOLE, DeviceMesh([1, 0, 2, 3], (2, 2)), "[S0,R]") + 1
    with pytest.raises(ShardSpecError, match="one process per device"):
        tensor.to_torch()
    # Nothing is left of it.
    torch.testing.assert_close((tensor + 1).to_global(), WHOLE + 1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ["logsumexp", "amin"])
def test_shards_that_torch_splits_into_unequal_numbers_are_refused(name):
    """On three devices one has a row alone; where torch finishes the sum it splits rows by two."""
    mesh = DeviceMesh(range(6), (3, 2))
    tensor = cut(WHOLE.float(), mesh, "[S0,R|P1]")
    with pytest.raises(LayoutError, match=r"where ranks go different ways.*start .* torchrun"):
        getattr(tensor, name)(1).sum().to_global().backward()


def test_a_job_that_has_ended_meanwhile_changes_nothing(tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    left, right = torch.arange(15.0).reshape(5, 3), torch.arange(6.0).reshape(3, 2)

    def multiplied():
        return (DTensor(left, mesh, "[S0,R]") @ DTensor(right, mesh, "[S01,R]")).full_tensor()

    assert torch.equal(multiplied(), left @ right)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/at", rank=0, world_size=1)
    dist.destroy_process_group()  # torch forgets the names of all groups
    assert torch.equal(multiplied(), left @ right)


def test_threads_take_turns():
    results: dict[int, Any] = {}

    def work(seed: int) -> None:
        whole = WHOLE * seed
        tensor = Cut(whole, MESHES[2, 2], "[S0,S1]")
        results[seed] = all(
            torch.allclose((tensor @ tensor.T).to_global(), whole @ whole.T) for _ in range(5)
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: True, 2: True, 3: True}
